#!/bin/sh
# Runs C test programs, $TEST_JOBS (1) at a time, each at most $TEST_TIMEOUT (300) s: run.sh PROGRAM...
# An emulator that runs them is $RUN_WITH; $CC is a compiler for the machine that they are compiled for.
# Shows the output of those that fail or skip (and of the programs $SHOW), and closes with a count.
if [ "$1" = --one ]; then
    name=$(basename "$2")
    log=$results/$name.log
    timeout -k 5 "${TEST_TIMEOUT:-300}" $RUN_WITH "$2" >"$log" 2>&1 </dev/null
    code=$?
    case $code in
    0)
        case " ${SHOW:-} " in *" $name "*) text=$(cat "$log") ;; *) text= ;; esac
        text=$text${text:+
}"  ok       $name"
        ;;
    77) text="  skipped  $name: $(tail -n 1 "$log")" ;;
    124) text="  FAILED   $name: no end after ${TEST_TIMEOUT:-300} s
$(tail -n 100 "$log")" ;;
    *) text="  FAILED   $name: exit code $code
$(tail -n 100 "$log")" ;;
    esac
    printf '%s\n' "$text"
    echo $code >"$results/$name.code"
    exit 0
fi
results=$(mktemp -d) || exit 1
export results
trap 'rm -rf "$results"' EXIT
printf '%s\0' "$@" | xargs -0 -n 1 -P "${TEST_JOBS:-1}" "$0" --one
passed=0 failed=0 skipped=0
for program in "$@"; do
    case $(cat "$results/$(basename "$program").code" 2>/dev/null) in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $((passed + skipped)) -gt 0 ]
