#!/bin/sh
# Runs C test programs one after the other, each at most $TEST_TIMEOUT (120) s: run.sh PROGRAM...
# Shows the output of those that fail or skip (and of the programs $SHOW), and closes with a count.
log=$(mktemp) || exit 1
limit=${TEST_TIMEOUT:-120}
trap 'rm -f "$log"' EXIT
passed=0 failed=0 skipped=0
for program in "$@"; do
    name=$(basename "$program")
    timeout -k 5 "$limit" "$program" >"$log" 2>&1 </dev/null
    code=$?
    case $code in
    0)
        passed=$((passed + 1))
        case " ${SHOW:-} " in *" $name "*) cat "$log" ;; esac
        echo "  ok       $name"
        ;;
    77) skipped=$((skipped + 1)) && echo "  skipped  $name: $(tail -n 1 "$log")" ;;
    *)
        failed=$((failed + 1))
        [ $code = 124 ] && reason="no end after $limit s" || reason="exit code $code"
        echo "  FAILED   $name: $reason"
        tail -n 100 "$log"
        ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $((passed + skipped)) -gt 0 ]
