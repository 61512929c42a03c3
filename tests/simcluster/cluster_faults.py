"""Planted faults, and how many seeds the simulated cluster takes to find each.

`make simcluster-faults`. A fault is a change of one source file. Each gives a core of its own,
which runs until an invariant is violated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in csrc
    old: str  # occurs once in the file
    new: str


SYNC, WAIT, STATE = "shm/shm_sync.c", "shm/shm_wait.c", "shm/shm_state.c"
STUCK, WATCH, MAP = "shm/shm_stuck.c", "shm/shm_watch.c", "shm/shm_map.c"
MEET, HOST, SHM = "shm/shm_rendezvous.c", "shm/shm_host.c", "shm/shm.c"
GATHER, REDUCE = "exchange/exchange_shared_gather.c", "exchange/exchange_shared_reduce.c"
SHARED, PAUSE = "exchange/exchange_shared.c", "exchange/exchange_shared_wait.c"
COMM = "comm/comm_shm.c"

FAULTS = [
    # Barrier and agreement.
    Fault(
        "barrier ends one rank early",
        SYNC,
        "if (arrived == round * (uint32_t)shm->world) {",
        "if (arrived >= round * (uint32_t)shm->world - 1) {",
    ),
    Fault(
        "agreement without its second barrier",
        SYNC,
        "FSDPC_TRY(fsdpc_shm_barrier(shm, what));\n    return status;",
        "return status;",
    ),
    Fault(
        "text of an agreement written after the barrier",
        SYNC,
        "    fsdpc_agree_fill(&shm->control->blocks[shm->rank].agree, text);\n"
        "    FSDPC_TRY(fsdpc_shm_barrier(shm, what));\n",
        "    FSDPC_TRY(fsdpc_shm_barrier(shm, what));\n"
        "    fsdpc_agree_fill(&shm->control->blocks[shm->rank].agree, text);\n",
    ),
    Fault(
        "barrier wakes nobody",
        SYNC,
        "if (atomic_load(&control->barrier_sleepers) > 0) {",
        "if (false) {",
    ),
    Fault(
        "barrier counts its sleepers after it looks",
        SYNC,
        "    atomic_fetch_add(&shm->control->barrier_sleepers, 1);\n",
        "",
    ),
    Fault(
        "barrier does not look for ranks that left",
        SYNC,
        "FSDPC_GOTO(check_missing_left(shm, round, what), end);",
        "",
    ),
    Fault("barrier names no missing rank", SYNC, "missing[count++] = i;", "missing[0] = i;"),
    # Waits, failures, departures.
    Fault("deadline of a wait unchecked", WAIT, "if (now_ns >= deadline_ns) {", "if (false) {"),
    Fault(
        "a sleep does not see the failure that came before it",
        WAIT,
        "    FSDPC_TRY(fsdpc_shm_check(shm, what));\n    int64_t now_ns",
        "    int64_t now_ns",
    ),
    Fault(
        "a failure wakes nobody",
        STATE,
        "atomic_compare_exchange_strong(&shm->control->failure, &none, failure);\n"
        "    fsdpc_shm_wake_all(shm);",
        "atomic_compare_exchange_strong(&shm->control->failure, &none, failure);",
    ),
    Fault(
        "a failure does not count up the word of all sleepers",
        STATE,
        "atomic_fetch_add(&control->broadcast, 1);",
        "",
    ),
    Fault(
        "abort published before its text",
        STATE,
        '    snprintf(kept, FSDPC_SHM_ABORT_BYTES, "%s", text && text[0] ? text : "(no '
        'reason given)");\n'
        "    fsdpc_shm_fail(shm, FSDPC_SHM_ABORTED, shm->rank);",
        "    fsdpc_shm_fail(shm, FSDPC_SHM_ABORTED, shm->rank);\n"
        '    snprintf(kept, FSDPC_SHM_ABORT_BYTES, "%s", text && text[0] ? text : "(no '
        'reason given)");',
    ),
    Fault(
        "an abort names the wrong rank",
        STATE,
        "fsdpc_shm_fail(shm, FSDPC_SHM_ABORTED, shm->rank);",
        "fsdpc_shm_fail(shm, FSDPC_SHM_ABORTED, (shm->rank + 1) % shm->world);",
    ),
    Fault(
        "last rank not watched",
        WATCH,
        "for (int i = 0; i < shm->world; i++) {\n            if (polls",
        "for (int i = 0; i < shm->world - 1; i++) {\n            if (polls",
    ),
    Fault(
        "a rank that leaves counts as dead",
        WATCH,
        "if (!fsdpc_shm_left(shm, i)) {",
        "{",
    ),
    Fault(
        "leaving marks nothing",
        SHM,
        "atomic_store(&shm->control->slots[shm->rank].left, 1);",
        "",
    ),
    Fault(
        "a rank that left is named, not the failure before",
        WAIT,
        "    char op[FSDPC_SHM_WAIT_TEXT];\n    FSDPC_TRY(fsdpc_shm_check(shm, what));\n",
        "    char op[FSDPC_SHM_WAIT_TEXT];\n",
    ),
    Fault(
        "a rank that gave up is late for others",
        WAIT,
        "    FSDPC_TRY(fsdpc_shm_check(shm, what));\n    for (int i = 0; i < count; i++) {",
        "    for (int i = 0; i < count; i++) {",
    ),
    # Rendezvous.
    Fault(
        "pidfds of other ranks",
        MEET,
        "shm->peers[first + i].pidfd = passed.fds[i];",
        "shm->peers[first + (i + 1) % passed.count].pidfd = passed.fds[i];",
    ),
    Fault(
        "no word to the others when set-up fails",
        MEET,
        "        fsdpc_shm_message_fail(shm->peers[0].socket, status, fsdpc_error_text());",
        "        (void)status;",
    ),
    Fault("rank 0 keeps its listener", HOST, "fsdpc_shm_close(&self.listener);", ""),
    Fault(
        "control area stays mapped",
        SHM,
        "fsdpc_shm_unmap(shm->control, fsdpc_round_up(sizeof *shm->control, "
        "fsdpc_shm_page_bytes()));",
        "",
    ),
    Fault(
        "a rank that reserves memory is not named",
        MAP,
        "return fsdpc_shm_timeout_error(shm, &RESERVING, &other, 1);",
        "(void)other;\n            return status;",
    ),
    # Ranks that all wait.
    Fault(
        "a sleeper does not say that it sleeps",
        STUCK,
        "atomic_store(&control->asleep, 1);",
        "",
    ),
    Fault(
        "a bell that does not change for who is about to sleep",
        STUCK,
        "        atomic_fetch_add(&control->bell, 1);\n        fsdpc_shm_wake",
        "        fsdpc_shm_wake",
    ),
    Fault(
        "ranks stand still whatever has changed since",
        STUCK,
        "return atomic_load(&outer->control->changes) == count;",
        "return true;",
    ),
    Fault(
        "a waiter of an earlier count stands still",
        STUCK,
        "word & CLOSED && word >> COUNT_SHIFT == count;",
        "word & CLOSED;",
    ),
    Fault(
        "ranks that wait are not woken to act",
        STUCK,
        "            ring(each);\n        }\n    }\n    return false;",
        "        }\n    }\n    return false;",
    ),
    # Gather.
    Fault(
        "slot joined with values of an earlier pass",
        GATHER,
        "bool same = slot->unit == fsdpc_unit_use(unit)->id && slot->tag == x->tag;",
        "bool same = slot->unit == fsdpc_unit_use(unit)->id;",
    ),
    Fault(
        "slot joined with values of another unit",
        GATHER,
        "bool same = slot->unit == fsdpc_unit_use(unit)->id && slot->tag == x->tag;",
        "bool same = slot->tag == x->tag;",
    ),
    Fault(
        "slot claimed from its holders",
        GATHER,
        "if (!same && (slot->holders > 0 || !may_claim)) {",
        "if (!same && !may_claim) {",
    ),
    Fault(
        "masters read one pass early",
        GATHER,
        "return ready >= x->tag || (older",
        "return ready + 1 >= x->tag || (older",
    ),
    Fault(
        "masters of an earlier step count as final",
        GATHER,
        "ready >> FSDPC_TAG_BITS >= x->tag >> FSDPC_TAG_BITS",
        "(ready >> FSDPC_TAG_BITS) + 1 >= x->tag >> FSDPC_TAG_BITS",
    ),
    Fault(
        "chunk counted before it is written",
        GATHER,
        "        FSDPC_TRY(fill_chunk(x, unit, r, chunk));\n"
        "        if (atomic_fetch_add(&slot->done, 1) + 1 == slot->total) {\n"
        "            fsdpc_shared_notify(x);\n        }\n",
        "        if (atomic_fetch_add(&slot->done, 1) + 1 == slot->total) {\n"
        "            fsdpc_shared_notify(x);\n        }\n"
        "        FSDPC_TRY(fill_chunk(x, unit, r, chunk));\n",
    ),
    Fault(
        "gather does not wait for others' chunks",
        GATHER,
        "while (all && atomic_load(&slot->done) < slot->total) {",
        "while (false) {",
    ),
    Fault(
        "last chunk wakes nobody",
        GATHER,
        "if (atomic_fetch_add(&slot->done, 1) + 1 == slot->total) {",
        "if (atomic_fetch_add(&slot->done, 1) == slot->total) {",
    ),
    Fault(
        "lock of a slot taken by two",
        GATHER,
        "if (atomic_compare_exchange_weak(&slot->lock, &holder, (uint32_t)x->rank + 1)) {",
        "if (atomic_load(&slot->lock) == holder) {\n            atomic_store(&slot->lock, 1);",
    ),
    Fault(
        "lock of a slot never times out",
        GATHER,
        "if (holder > 0 && fsdpc_shm_now_ns() > deadline) {",
        "if (false) {",
    ),
    Fault(
        "lock of a slot outlives its holder",
        GATHER,
        "        sched_yield();\n        FSDPC_TRY(fsdpc_shm_check(x->shm, what));",
        "        sched_yield();",
    ),
    Fault(
        "release wakes nobody",
        GATHER,
        "    if (last) {\n        fsdpc_shared_notify(x);\n    }\n    return FSDPC_OK;",
        "    (void)last;\n    return FSDPC_OK;",
    ),
    Fault(
        "claim begins with chunks of the last values",
        GATHER,
        "            atomic_store(&slot_next(slot)[r], 0);\n",
        "            if (r > 0) {\n                atomic_store(&slot_next(slot)[r], "
        "0);\n            }\n",
    ),
    Fault(
        "holder of a slot's lock not named",
        GATHER,
        "const int late = (int)holder - 1;",
        "const int late = x->rank;",
    ),
    # Passes.
    Fault(
        "pass begun for the next one, too",
        SHARED,
        "atomic_store(&x->shared->ranks[x->rank].ready, tag);",
        "atomic_store(&x->shared->ranks[x->rank].ready, tag + 1);",
    ),
    Fault(
        "begin of a pass wakes nobody",
        SHARED,
        "ranks[x->rank].ready, tag);\n    fsdpc_shared_notify(x);",
        "ranks[x->rank].ready, tag);",
    ),
    Fault(
        "end of a forward does not wait",
        SHARED,
        "if (all_left(x) || fsdpc_shared_must_act",
        "if (true || fsdpc_shared_must_act",
    ),
    Fault(
        "gather slots used before all ranks have opened them",
        SHARED,
        "return fsdpc_shm_barrier(x->shm, &what);",
        "(void)what;\n    return FSDPC_OK;",
    ),
    # Reduce.
    Fault(
        "post published before it is written",
        REDUCE,
        "    FSDPC_TRY(fsdpc_grad_pack(unit, grads, slot_memory(x, x->rank, slot), "
        "post_used(post)));\n",
        "    post->slot = (uint32_t)slot;\n"
        "    atomic_store(&post->round, round_tag(x, fsdpc_unit_use(unit)->posted + 1));\n"
        "    FSDPC_TRY(fsdpc_grad_pack(unit, grads, slot_memory(x, x->rank, slot), "
        "post_used(post)));\n",
    ),
    Fault(
        "slot of a post written after its publication",
        REDUCE,
        "    post->slot = (uint32_t)slot;\n    fsdpc_unit_use(unit)->posted++;\n"
        "    atomic_store(&post->round, round_tag(x, fsdpc_unit_use(unit)->posted));\n",
        "    fsdpc_unit_use(unit)->posted++;\n"
        "    atomic_store(&post->round, round_tag(x, fsdpc_unit_use(unit)->posted));\n"
        "    post->slot = (uint32_t)slot;\n",
    ),
    Fault(
        "acknowledgements not set back",
        REDUCE,
        "    atomic_store(ack(x, x->rank, slot), 0);\n",
        "",
    ),
    Fault(
        "reduce slot free one rank early",
        REDUCE,
        "atomic_load(ack(x, x->rank, slot)) == (uint32_t)x->world;\n}\n\nstatic bool",
        "atomic_load(ack(x, x->rank, slot)) >= (uint32_t)x->world - 1;\n}\n\nstatic bool",
    ),
    Fault(
        "acknowledged before it is read",
        REDUCE,
        "    FSDPC_TRY(fsdpc_grad_sum(unit, sources, x->world));\n"
        "    for (int r = 0; r < x->world; r++) {\n"
        "        struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, r);\n"
        "        if (atomic_load(&post->round) == round) { /* slots of no bytes have no "
        "address */\n"
        "            acknowledge(x, r, (int)post->slot);\n        }\n    }\n",
        "    for (int r = 0; r < x->world; r++) {\n"
        "        struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, r);\n"
        "        if (atomic_load(&post->round) == round) { /* slots of no bytes have no "
        "address */\n"
        "            acknowledge(x, r, (int)post->slot);\n        }\n    }\n"
        "    FSDPC_TRY(fsdpc_grad_sum(unit, sources, x->world));\n",
    ),
    Fault(
        "sum without a late rank",
        REDUCE,
        "round_tag(x, 1) ? &ctl->first : &ctl->ended) <= x->backwards) {",
        "round_tag(x, 1) ? &ctl->first : &ctl->ended) < x->backwards) {",
    ),
    Fault(
        "sum in another order on each rank",
        REDUCE,
        "        sources[r] = present ?",
        "        sources[(r + x->rank) % x->world] = present ?",
    ),
    Fault(
        "used marks of this rank alone",
        REDUCE,
        "        if (present) {\n            fsdpc_unit_add_used",
        "        if (present && r == x->rank) {\n            fsdpc_unit_add_used",
    ),
    Fault(
        "wrong reduce slot",
        REDUCE,
        "slot_memory(x, r, (int)post->slot) : NULL;",
        "slot_memory(x, r, 0) : NULL;",
    ),
    Fault(
        "end of a backward does not wait",
        REDUCE,
        "ranks[r].ended) <= x->backwards) {\n            return false;",
        "ranks[r].ended) < x->backwards) {\n            return false;",
    ),
    Fault(
        "end of a backward wakes nobody",
        REDUCE,
        "ranks[x->rank].ended, x->backwards + 1);\n    fsdpc_shared_notify(x);",
        "ranks[x->rank].ended, x->backwards + 1);",
    ),
    Fault(
        "last sums not taken at the end of a backward",
        REDUCE,
        "        bool all_have_ended = all_ended(x);\n        FSDPC_GOTO(progress(x), done);\n",
        "        FSDPC_GOTO(progress(x), done);\n        bool all_have_ended = all_ended(x);\n",
    ),
    Fault(
        "overflow memory given back while it is read",
        REDUCE,
        "if (!s->over_used[u] || !slot_is_free(x, slot)) {",
        "if (!s->over_used[u]) {",
    ),
    Fault(
        "end of a backward names no late rank",
        REDUCE,
        "ranks[r].ended) <= x->backwards) {\n            missing[count++] = r;",
        "ranks[r].ended) <= x->backwards) {\n            missing[count] = r;",
    ),
    Fault(
        "deadline of an exchange's wait unchecked",
        PAUSE,
        "return fsdpc_shm_now_ns() < wait->deadline_ns ? FSDPC_OK\n"
        "                                                  : fsdpc_shared_name_late(x, "
        "&wait->what);",
        "return FSDPC_OK;",
    ),
    # Collectives.
    Fault(
        "one half of the stage for all rounds",
        COMM,
        "size_t half = (size_t)rank * 2 + (self->round & 1);",
        "size_t half = (size_t)rank * 2;",
    ),
    Fault(
        "collective read before all have written",
        COMM,
        "FSDPC_TRY(fsdpc_shm_barrier(self->shm, &wait));\n    FSDPC_TRY(check_calls",
        "(void)wait;\n    FSDPC_TRY(check_calls",
    ),
]


def run(command: list[str], most_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=most_s
    )


def plant(fault: Fault, build: Path) -> Path:
    """A core with the fault."""
    source = (ROOT / "csrc" / fault.file).read_text()
    if source.count(fault.old) != 1:
        sys.exit(f"{fault.name}: its text occurs {source.count(fault.old)} times in {fault.file}")
    number = FAULTS.index(fault)
    folder = build / f"fault-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / Path(fault.file).name
    changed.write_text(source.replace(fault.old, fault.new))
    compiler, *flags = os.environ["CLUSTER_CC"].split()
    made, library = folder / "changed.o", folder / "core.so"
    wraps = os.environ["CLUSTER_WRAPS"].split()
    points = ["-include", "tests/simcluster/points.h"]
    for command in (
        [compiler, *flags, "-w", "-fPIC", *points, "-c", str(changed), "-o", str(made)],
        # The changed file comes first, so that the one in the archive is not needed.
        [
            compiler,
            "-shared",
            "-Wl,-z,now",
            "-Wl,-Bsymbolic",
            *wraps,
            str(build / "program.o"),
            str(made),
            str(build / "core.a"),
            "-o",
            str(library),
            "-lm",
        ],
    ):
        result = run(command)
        if result.returncode:
            sys.exit(f"{fault.name}: {result.stderr}")
    return library


def seeds_to_find(fault: Fault, build: Path, most: int) -> tuple[int | None, str]:
    """None: not found; and what was violated."""
    library = plant(fault, build)
    command = [str(build / "simcluster"), str(library), "--count", str(most), "--until-found"]
    try:
        result = run(command)
    except subprocess.TimeoutExpired:
        return None, "no end in 300 s"
    lines = result.stdout.splitlines()
    if result.returncode < 0:
        return 0, f"signal {-result.returncode}"
    last = lines[-1].split() if lines else []
    what = next((line for line in lines if line.startswith("VIOLATION")), "")
    return (int(last[1]) if last[:1] == ["found"] else None), what.removeprefix("VIOLATION ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--least", type=float, default=0.7, help="share that must be found")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in fault.name]
    build = args.build.resolve()
    found = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda fault: seeds_to_find(fault, build, args.count), faults)
        for fault, (seeds, what) in zip(faults, results, strict=True):
            found += seeds is not None
            shown = "-" if seeds is None else seeds
            print(f"{shown:>6}  {fault.name:55}  {what[:90]}", flush=True)
    print(f"{found} of {len(faults)} faults found within {args.count} seeds")
    sys.exit(found < args.least * len(faults))


if __name__ == "__main__":
    main()
