"""Plant faults in the core, and count how many seeds the simulated cluster takes to find each.

`make simcluster-faults` runs this file. A fault is a change of one source file. For each fault, a
core with the change is built, and seeds run on that core until an invariant is violated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHUNK = 500  # how many seeds a search tries before its result is saved
C_TESTS = ("shm", "comm", "exchange", "unit", "tree")
C_TEST_S = 60  # timeout of a C test in seconds, about ten times the duration of the longest test
DECISION = ROOT / "docs/decisions/041-simulated-cluster.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
MENDED = Path(__file__).with_name("mended.list")
MENDED_HEAD = """\
# Seeds that find faults that the engine had, planted again. Written by
# `make simcluster-faults ARGS=--write`; `make cluster-run` runs them on the engine as it is, and
# `ARGS=--mended` on cores with the faults.
"""


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in csrc
    old: str  # the text that the fault replaces by `new`; it occurs once in the file
    new: str
    mended: bool = False  # True: the engine once had this fault, and it was repaired
    ways: str = ""  # options of simcluster that show the fault, such as "--wire" or "--replicas"


SYNC, WAIT, STATE = "shm/shm_sync.c", "shm/shm_wait.c", "shm/shm_state.c"
STUCK, WATCH, MAP = "shm/shm_stuck.c", "shm/shm_watch.c", "shm/shm_map.c"
MEET, HOST, SHM = "shm/shm_rendezvous.c", "shm/shm_host.c", "shm/shm.c"
GATHER, REDUCE = "exchange/exchange_shared_gather.c", "exchange/exchange_shared_reduce.c"
SHARED, PAUSE = "exchange/exchange_shared.c", "exchange/exchange_shared_wait.c"
COMM, CHANGES, TREE = "comm/comm_shm.c", "exchange/exchange_shared_changes.c", "tree/tree.c"
WEIGHTS = "exchange/exchange_weights.c"
MESSAGE = "shm/shm_message.c"
WIRE, LANDS = "exchange/exchange_wire.c", "exchange/exchange_wire_land.c"
WIRE_WAIT, WIRE_REDUCE = "exchange/exchange_wire_wait.c", "exchange/exchange_wire_reduce.c"
WIRE_HOST, FLIGHT = "exchange/exchange_wire_host.c", "comm/comm_flight.c"
REPLICAS, BACKWARD = "unit/unit_replicas.c", "tree/tree_backward.c"

# Faults that are not in the list, because no run can show them. After each colon: why not.
# - A replica begins to swap a sum before its shard group has finished the sum: the sum changes
#   afterwards, so the replica swaps the sum again.
# - Both flights (sets of messages) of a swap have one key: equal keys match in posting order.
# - The set-up of the slots has no barrier: rank 0 empties the slots before it begins a pass, and no
#   rank takes a slot until each rank has begun the pass or waits. Waits follow the set-up.
# - The begin of a pass wakes no rank: the rank that begins gathers the root at once. Its chunk is
#   the last and wakes all. If the rank must wait before that, its wait wakes those that may act.
# - A rank enters a barrier after a failure: the wait in the barrier checks for failures as well.
# - The last failure is reported, not the first: the text of each failure quotes the one before.
# - Masters of an earlier pass are read at once, into a slot or private memory: the first gather of
#   a pass takes its slot only when every rank has begun the pass or stands still, and a rank that
#   stands still changes no masters before that gather has ended.
# - The end of a forward waits for a rank that has left or that has begun a later pass: a rank in a
#   later pass waits for this rank at its first gather, so this rank soon finds that all ranks stand
#   still and only loses time. The values of a rank that left are checked separately.
# - A rank joins a slot with values of a rank that had not changed its weights: the check after the
#   gather refuses these values as well, unless a rank counts writes that change nothing.
# - The first post of a rank wakes no rank: the rank then ends its backward or posts late gradients,
#   which wakes the others. If the rank must wait before that, the last acknowledgement wakes all,
#   or the last rank to sleep wakes all for its fallback. At worst, the rank uses overflow memory.
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
    Fault(
        "a rank that sleeps in a barrier wakes nobody",
        SYNC,
        "    fsdpc_shm_ring(shm);\n",
        "",
        mended=True,
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
        mended=True,
    ),
    Fault(
        "a rank that gave up is late for others",
        WAIT,
        "    FSDPC_TRY(fsdpc_shm_check(shm, what));\n    if (fsdpc_shm_verdict",
        "    if (fsdpc_shm_verdict",
        mended=True,
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
        mended=True,
    ),
    # Detection that all ranks wait.
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
        mended=True,
    ),
    Fault(
        "a rank that has the lock of a slot looks like one that waits",
        PAUSE,
        "(fsdpc_shm_stands(x->shm, rank) && !has_lock(x, rank));",
        "fsdpc_shm_stands(x->shm, rank);",
        mended=True,
    ),
    # Passes.
    Fault(
        "pass begun for the next one, too",
        SHARED,
        "atomic_store(&x->shared->ranks[x->rank].ready, tag);",
        "atomic_store(&x->shared->ranks[x->rank].ready, tag + 1);",
    ),
    Fault(
        "end of a forward does not wait",
        SHARED,
        "if (all_left(x)) {",
        "if (true) {",
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
        "        if (atomic_load(&post->round) == round) { /* sources[r] is NULL for slots of "
        "0 bytes too */\n"
        "            acknowledge(x, r, (int)post->slot);\n        }\n    }\n",
        "    for (int r = 0; r < x->world; r++) {\n"
        "        struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, r);\n"
        "        if (atomic_load(&post->round) == round) { /* sources[r] is NULL for slots of "
        "0 bytes too */\n"
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
        "FSDPC_TRY(explain(self, half, fsdpc_shm_barrier(self->shm, &wait), what));",
        "(void)wait;\n    FSDPC_TRY(explain(self, half, FSDPC_OK, what));",
    ),
    # Weights that change.
    Fault(
        "values of a rank that left beside changed ones",
        CHANGES,
        "if (atomic_load(&x->shared->ranks[r].touched) > ready) {",
        "if (false) {",
        mended=True,
    ),
    Fault(
        "values of a rank that waits elsewhere beside changed ones",
        CHANGES,
        "if (ready < x->tag) {",
        "if (ready < x->tag) {\n        return false;",
        mended=True,
    ),
    Fault(
        "changes of other ranks unchecked",
        CHANGES,
        "        touched <= atomic_load(&other->before)) {",
        "        false) {",
    ),
    Fault(
        "a change of this rank unchecked",
        CHANGES,
        "return changed_here(x, 0, &before) && atomic_load(&other->touched) <= before &&",
        "return changed_here(x, 0, &before) && false &&",
    ),
    Fault(
        "passes with gradients continue the count of those without",
        TREE,
        "return grad && pass < last_step ? (pass / pass_step + 1) * pass_step : pass + 1;",
        "(void)grad;\n    return pass + 1;",
    ),
    Fault(
        "passes keep their numbers after ranks have met",
        TREE,
        "    tree->pass = (tree->pass / pass_step + 1) * pass_step;",
        "",
        ways="--joins",
    ),
    Fault(
        "a tag without the count of backwards",
        TREE,
        "return tree->backwards << FSDPC_TAG_BITS | tree->pass;",
        "return (uint64_t)1 << FSDPC_TAG_BITS | tree->pass;",
    ),
    Fault(
        "values of a rank that waits elsewhere compared with its last pass alone",
        CHANGES,
        "bool seen = s->seen_at[r] > ready && s->seen_at[r] >= s->earlier;\n"
        "    if (!seen && (ready == 0 || s->earlier > ready)) {",
        "bool seen = false;\n    if (false) {",
        mended=True,
    ),
    Fault(
        "a change is looked for just before this pass alone",
        CHANGES,
        "return changed > since && changed >> FSDPC_TAG_BITS == x->tag >> FSDPC_TAG_BITS;",
        "(void)since;\n    return changed == x->tag;",
        mended=True,
    ),
    Fault(
        "weights of a rank that did not wait at the end of this forward unchecked",
        CHANGES,
        "    if (is_changed_behind(x, r)) {",
        "    if (false && is_changed_behind(x, r)) {",
        mended=True,
    ),
    Fault(
        "a change that has just begun behind a rank that is late",
        CHANGES,
        "compare_rank(x, x->shared->samples, r, false) != FSDPC_SAME;",
        "compare_rank(x, x->shared->samples, r, false) == FSDPC_MOST;",
        mended=True,
    ),
    Fault(
        "weights of a rank that did not wait at the end of a later forward unchecked",
        CHANGES,
        "return atomic_load(&x->shared->ranks[r].early) >= x->tag &&",
        "return atomic_load(&x->shared->ranks[r].early) == x->tag &&",
        mended=True,
    ),
    Fault(
        "numbers of weights not compared",
        CHANGES,
        "    if (other_number(x, r, who)) {",
        "    if (false && other_number(x, r, who)) {",
        mended=True,
    ),
    Fault(
        "earlier weights of a rank that waits elsewhere not looked for",
        CHANGES,
        " || older_number(x, r));",
        " || (false && older_number(x, r)));",
        mended=True,
    ),
    Fault(
        "weights have no numbers in a pass with gradients",
        WEIGHTS,
        "    if (pass->grad && own->last >> FSDPC_TAG_BITS != pass->tag >> FSDPC_TAG_BITS) {",
        "    if (pass->grad) {",
        mended=True,
    ),
    Fault(
        "samples renewed before the change is known",
        CHANGES,
        "enum fsdpc_found found = compare_rank(x, x->shared->samples, x->rank, false);",
        "enum fsdpc_found found = compare_rank(x, x->shared->samples, x->rank, true);",
        mended=True,
    ),
    # Further faults of barriers, waits and departures.
    Fault(
        "a barrier asks for the arrival before the departure",
        SYNC,
        "if (fsdpc_shm_left(shm, i) &&\n"
        "            before(atomic_load(&shm->control->slots[i].barrier_seq), round)) {",
        "if (before(atomic_load(&shm->control->slots[i].barrier_seq), round) &&\n"
        "            fsdpc_shm_left(shm, i)) {",
    ),
    Fault(
        "the end of a backward asks for the end before the departure",
        REDUCE,
        "if (fsdpc_shm_left(x->shm, r) && atomic_load(&x->shared->ranks[r].ended) "
        "<= x->backwards) {",
        "if (atomic_load(&x->shared->ranks[r].ended) <= x->backwards && "
        "fsdpc_shm_left(x->shm, r)) {",
    ),
    Fault(
        "the end of a backward does not look for ranks that left",
        REDUCE,
        "        FSDPC_GOTO(check_missing_left(x, &wait.what), done);\n",
        "",
    ),
    Fault(
        "a gather does not look for ranks that left",
        GATHER,
        "if (fsdpc_shm_left(x->shm, r) && !masters_final(x, r, true)) {",
        "if (false) {",
    ),
    Fault(
        "a barrier done a round early",
        SYNC,
        "        if (!before(old, round)) {\n            break;",
        "        if (!before(old, round - 1)) {\n            break;",
    ),
    Fault(
        "a spinning rank takes the last round for this one",
        SYNC,
        "if (!before(done, round)) {\n            return true;",
        "if (!before(done, round - 1)) {\n            return true;",
    ),
    Fault(
        "a barrier's number never written",
        SYNC,
        "    atomic_store_explicit(&control->slots[shm->rank].barrier_seq, round, "
        "memory_order_release);\n",
        "",
    ),
    Fault(
        "sleepers do not watch the word of failures",
        WAIT,
        "syscall(SYS_futex_waitv, entries, 2,",
        "syscall(SYS_futex_waitv, entries, 1,",
    ),
    Fault(
        "a sleep without futex_waitv lasts for its whole slice",
        WAIT,
        "if (left_ns > SHORT_SLICE_NS) {",
        "if (false) {",
    ),
    Fault(
        "a slice without an end",
        WAIT,
        "int64_t until_ns = now_ns + SLICE_NS < deadline_ns ? now_ns + SLICE_NS : deadline_ns;",
        "int64_t until_ns = deadline_ns;",
    ),
    Fault(
        "failures are not looked for",
        STATE,
        "if (failure == 0) {",
        "if (failure == 0 || failure >> 16 == FSDPC_SHM_ABORTED) {",
    ),
    Fault(
        "a death is another rank's",
        WATCH,
        "fsdpc_shm_fail(shm, FSDPC_SHM_DEAD, i);",
        "fsdpc_shm_fail(shm, FSDPC_SHM_DEAD, (i + 1) % shm->world);",
    ),
    Fault(
        "the watcher ends at the first death",
        WATCH,
        "                polls[i].fd = -1;\n",
        "                return NULL;\n",
    ),
    Fault(
        "a death is told again and again",
        WATCH,
        "                polls[i].fd = -1;\n",
        "",
    ),
    Fault("the watcher is not stopped", WATCH, "    eventfd_write(shm->stop_fd, 1);\n", ""),
    Fault("the watcher is not joined", WATCH, "    pthread_join(shm->watcher, NULL);\n", ""),
    # Further faults of the rendezvous.
    Fault(
        "rank 0 that is not there yet is an error",
        MEET,
        "if (errno != ECONNREFUSED && errno != EAGAIN",
        "if (errno != EAGAIN",
    ),
    Fault(
        "nothing to read is an error",
        HOST,
        "    if (rc == EAGAIN) {\n        return FSDPC_OK;\n    }\n"
        "    fsdpc_shm_descriptors_close(&passed);\n    if (rc == 0 && got.kind",
        "    fsdpc_shm_descriptors_close(&passed);\n    if (rc == 0 && got.kind",
    ),
    Fault(
        "a closed connection tells more than the word before it",
        MEET,
        "    status = receive_from_host(self, &got, &passed);\n    return status == FSDPC_OK ?",
        "    (void)got;\n    return status == FSDPC_OK ?",
        mended=True,
    ),
    Fault(
        "go before the last rank is ready",
        HOST,
        "ready < shm->world - 1) {",
        "ready < shm->world - 2) {",
    ),
    Fault(
        "no pidfds after all, and some ranks do not know",
        HOST,
        "welcome.watch_sockets = shm->watch_sockets;",
        "welcome.watch_sockets = 0;",
    ),
    Fault(
        "a failure of set-up is not told by rank 0",
        HOST,
        "        status = send_to_peer(&self, i, &go, NULL, 0);\n    }\n"
        "    if (status != FSDPC_OK) {",
        "        status = send_to_peer(&self, i, &go, NULL, 0);\n    }\n    if (false) {",
    ),
    Fault(
        "a failure of rank 0 is anonymous",
        HOST,
        'own ? "rank 0 gave up: " : ""',
        'own ? "" : ""',
        mended=True,
    ),
    Fault(
        "rank 0 does not read why a rank closed the connection",
        HOST,
        "for (int k = 0; sent == FSDPC_E_PEER",
        "for (int k = 2; sent == FSDPC_E_PEER",
        mended=True,
    ),
    Fault(
        "lost descriptors are an unexpected message",
        MESSAGE,
        "passed->lost = (packet.msg_flags & MSG_CTRUNC) != 0;",
        "passed->lost = false;",
        mended=True,
    ),
    Fault(
        "a thread that cannot start is no failure",
        WATCH,
        "    int rc = start_thread(shm);\n    if (rc != 0) {",
        "    int rc = start_thread(shm);\n    if (false && rc != 0) {",
    ),
    Fault(
        "pages that cannot be had are no failure",
        MAP,
        "FSDPC_KEEP(allocate_pages(shm, offset, bytes));",
        "(void)allocate_pages(shm, offset, bytes);",
    ),
    Fault(
        "pidfds stay open",
        MEET,
        "        fsdpc_shm_close(&shm->peers[i].pidfd);\n",
        "",
    ),
    Fault(
        "descriptors of a refused message stay open",
        MESSAGE,
        "    take_descriptors(&packet, passed);\n",
        "    take_descriptors(&packet, passed);\n"
        "    passed->count -= passed->count == 1 && text->kind == FSDPC_SHM_HELLO;\n",
    ),
    # Further faults of the detection that all ranks wait.
    Fault(
        "a better fallback of another rank does not count",
        STUCK,
        "(waits && (word >> WAY_SHIFT & 3) <= (uint64_t)way)) {",
        "waits) {",
    ),
    Fault(
        "a rank that left may still act",
        STUCK,
        "if (r == outer->rank || fsdpc_shm_left(outer, r) ||",
        "if (r == outer->rank ||",
    ),
    Fault(
        "a rank in a barrier may still act",
        STUCK,
        "if (waits || !waits_for_this_rank(shm, atomic_load(&slot->process))) {",
        "if (true || !waits_for_this_rank(shm, atomic_load(&slot->process))) {",
    ),
    Fault(
        "a rank stands still while it goes on",
        STUCK,
        "        atomic_store(&each->control->slots[each->rank].wait, 0);\n",
        "",
    ),
    Fault(
        "a wait of the count of now, not of the examination",
        STUCK,
        "if (waits == 1 && changes_of(each, view, &count)) {",
        "if (waits == 1 && changes_of(each, view, &count)) {\n"
        "            count = atomic_load(&each->control->changes);",
    ),
    Fault(
        "a wait is seen late",
        STUCK,
        "atomic_store(&each->control->slots[each->rank].wait, word);",
        "atomic_store_explicit(&each->control->slots[each->rank].wait, word, "
        "memory_order_release);",
    ),
    Fault(
        "a change is not counted",
        STUCK,
        "        atomic_fetch_add(&each->control->changes, 1);\n",
        "",
    ),
    Fault(
        "a change is counted after the bell",
        STUCK,
        "        atomic_fetch_add(&each->control->changes, 1);\n        ring(each);",
        "        ring(each);\n        atomic_fetch_add(&each->control->changes, 1);",
    ),
    Fault(
        "the bell rings before it changes",
        STUCK,
        "    atomic_fetch_add(&control->bell, 1);\n    if (atomic_load(&control->asleep)",
        "    if (atomic_load(&control->asleep)",
    ),
    Fault(
        "a view of the bell after the examination",
        STUCK,
        "    return fsdpc_shm_sleep_word(shm, &control->bell, view->bell, until_ns, what);",
        "    return fsdpc_shm_sleep_word(shm, &control->bell, atomic_load(&control->bell), "
        "until_ns,\n                                what);",
    ),
    # More of gathers.
    Fault(
        "a claim keeps the count of chunks",
        GATHER,
        "        atomic_store(&slot->done, 0);\n",
        "",
    ),
    Fault(
        "a slot is whole without its last chunk",
        GATHER,
        "slot->total = chunks * (uint32_t)x->world;",
        "slot->total = chunks * (uint32_t)x->world - 1;",
    ),
    Fault(
        "who joins does not hold",
        GATHER,
        "    slot->holders++;\n",
        "    slot->holders += !same;\n",
    ),
    Fault(
        "a claim while another rank is a pass behind",
        GATHER,
        "enum hold hold = hold_locked(x, unit, slot, chunks, final || act);",
        "enum hold hold = hold_locked(x, unit, slot, chunks, true);",
    ),
    Fault(
        "older masters are never read",
        GATHER,
        "return ready >= x->tag || (older && ready",
        "return ready >= x->tag || (false && older && ready",
    ),
    Fault(
        "older masters do not help",
        GATHER,
        "            masters_final(x, r, true)) {\n            return true;",
        "            masters_final(x, r, true)) {\n            return false;",
    ),
    Fault(
        "private memory lacks a rank's piece",
        GATHER,
        "    for (int k = 0; k < x->world; k++) {\n        int r = (x->rank + k) % x->world;\n"
        "        while",
        "    for (int k = 0; k < x->world - (x->world > 2); k++) {\n"
        "        int r = (x->rank + k) % x->world;\n        while",
    ),
    Fault(
        "private memory stays after its release",
        GATHER,
        "        FSDPC_TRY(fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit)));\n",
        "",
    ),
    Fault(
        "poison stays",
        GATHER,
        "        FSDPC_TRY(fsdpc_arena_unveil(x->arena, fsdpc_unit_range(unit)));\n",
        "",
    ),
    Fault(
        "a slot is released without its lock",
        GATHER,
        "    FSDPC_TRY(lock_slot(x, slot, &what));\n    slot_held",
        "    (void)what;\n    slot_held",
    ),
    Fault(
        "the lock is opened before the hold",
        GATHER,
        "        enum hold hold = hold_locked(x, unit, slot, chunks, final || act);\n"
        "        unlock_slot(slot);\n",
        "        unlock_slot(slot);\n"
        "        enum hold hold = hold_locked(x, unit, slot, chunks, final || act);\n",
    ),
    Fault(
        "a prefetch keeps its slot while this rank waits",
        GATHER,
        "        if (x->uses[u].begun && x->uses[u].refs == 0) {",
        "        if (false) {",
    ),
    # More of reductions.
    Fault(
        "a round does not name its backward",
        REDUCE,
        "return (x->backwards + 1) << 8 | n;",
        "return (uint64_t)1 << 8 | n;",
    ),
    Fault(
        "rounds of a backward count in the next one",
        REDUCE,
        "    forget_rounds(x);\n    FSDPC_GOTO(discard",
        "    FSDPC_GOTO(discard",
    ),
    Fault(
        "first posts made known before they are made",
        REDUCE,
        "    FSDPC_TRY(post_what_waits(x, 0));\n"
        "    atomic_store(&x->shared->ranks[x->rank].first, x->backwards + 1);\n",
        "    atomic_store(&x->shared->ranks[x->rank].first, x->backwards + 1);\n"
        "    FSDPC_TRY(post_what_waits(x, 0));\n",
    ),
    Fault(
        "gradients of no_sync are not sent",
        REDUCE,
        "    FSDPC_TRY(post_what_waits(x, 0));\n",
        "",
    ),
    Fault(
        "units that this rank did not run are not summed",
        REDUCE,
        "bool absent_too = atomic_load(&x->shared->ranks[x->rank].first) > x->backwards;",
        "bool absent_too = false;",
    ),
    Fault(
        "a rank that waits for a reduce slot keeps its prefetch",
        REDUCE,
        "        FSDPC_GOTO(fsdpc_shared_drop_prefetched(x), done);\n        /* With WAY_NONE",
        "        /* With WAY_NONE",
        mended=True,
    ),
    Fault(
        "a second post does not look for ranks that left",
        REDUCE,
        "        FSDPC_GOTO(way == FSDPC_WAY_NONE ? check_missing_left(x, &wait.what) : "
        "FSDPC_OK, done);\n",
        "",
        mended=True,
    ),
    Fault(
        "a rank that waits for a slot sums nothing",
        REDUCE,
        "        FSDPC_GOTO(progress(x), done);\n        if (previous_post_is_done",
        "        if (previous_post_is_done",
    ),
    Fault(
        "overflow memory of all units is one",
        REDUCE,
        "*slot = x->reduce_slots + fsdpc_unit_use(unit)->id;",
        "*slot = x->reduce_slots;",
    ),
    Fault(
        "one reduce slot for all units",
        REDUCE,
        "        if (slot_is_free(x, slot)) {\n            x->shared->next_base",
        "        if (true) {\n            x->shared->next_base",
    ),
    Fault(
        "acknowledged to the wrong rank",
        REDUCE,
        "            acknowledge(x, r, (int)post->slot);",
        "            acknowledge(x, (r + 1) % x->world, (int)post->slot);",
    ),
    Fault(
        "the last acknowledgement wakes nobody",
        REDUCE,
        "    if (atomic_fetch_add(ack(x, rank, slot), 1) + 1 == (uint32_t)x->world) {",
        "    if (atomic_fetch_add(ack(x, rank, slot), 1) == (uint32_t)x->world) {",
    ),
    Fault(
        "a wake-up reaches one sleeper",
        STATE,
        "syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);",
        "syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);",
    ),
    Fault(
        "a post wakes nobody",
        REDUCE,
        "round_tag(x, fsdpc_unit_use(unit)->posted));\n    fsdpc_shared_notify(x);",
        "round_tag(x, fsdpc_unit_use(unit)->posted));",
    ),
    Fault(
        "the end of a forward wakes nobody",
        SHARED,
        "ranks[x->rank].left, x->tag);\n    fsdpc_shared_notify(x);",
        "ranks[x->rank].left, x->tag);",
    ),
    # More of collectives.
    Fault(
        "a gathered piece of the last round",
        COMM,
        "const char *half = self->stage + (peer * 2 + (round & 1)) * STAGE_BYTES;",
        "const char *half = self->stage + (peer * 2 + (~round & 1)) * STAGE_BYTES;",
    ),
    Fault(
        "a gathered piece of the neighbour",
        COMM,
        "memcpy(all + peer * piece_bytes + at, half, n);",
        "memcpy(all + (peer + 1) % world * piece_bytes + at, half, n);",
    ),
    Fault(
        "a broadcast from the wrong rank",
        COMM,
        "        char *stage = stage_of(self, root);",
        "        char *stage = stage_of(self, comm->rank == root ? root : 0);",
    ),
    Fault(
        "a sum that lacks this rank's own piece",
        COMM,
        "src[i] = i == rank ? own : stage_of(self, (int)i) + rank * slot;",
        "src[i] = stage_of(self, (int)i) + rank * slot;",
    ),
    Fault(
        "different collectives take each other's bytes",
        COMM,
        "return a->op == b->op && a->dtype",
        "return a->dtype",
    ),
    # Ranks of several hosts.
    Fault(
        "own sums at another place than the host's",
        WIRE_REDUCE,
        "host ? host->hosts->host : x->rank,",
        "0,",
        ways="--wire",
    ),
    Fault(
        "a part of a gather that has landed is not said",
        LANDS,
        "        fsdpc_wire_say(x, FSDPC_WIRE_FILLED, slot, wire->host->fills[slot]);",
        "        (void)slot;",
        ways="--wire",
    ),
    Fault(
        "a part of a gather is said before it has landed",
        LANDS,
        "    int status = fsdpc_wire_land(x, &wire->gathers[id], what, NULL);",
        "    if (fsdpc_wire_is_shared(x, unit)) {\n"
        "        fsdpc_wire_say(x, FSDPC_WIRE_FILLED, slot, wire->host->fills[slot]);\n"
        "    }\n"
        "    int status = fsdpc_wire_land(x, &wire->gathers[id], what, NULL);",
        ways="--wire",
    ),
    Fault(
        "the parts of other ranks of the host are not awaited",
        WIRE,
        "    return fsdpc_wire_is_shared(x, unit)\n",
        "    return false && fsdpc_wire_is_shared(x, unit)\n",
        ways="--wire",
    ),
    Fault(
        "a slot is filled before the host's ranks have left it",
        WIRE,
        "    return fsdpc_wire_host_wait(x, FSDPC_WIRE_CLEARED,",
        "    return true ? FSDPC_OK : fsdpc_wire_host_wait(x, FSDPC_WIRE_CLEARED,",
        ways="--wire",
    ),
    Fault(
        "a slot shows values of an earlier pass",
        WIRE,
        "x->slot_unit[use->slot] == use->id && x->slot_tag[use->slot] == x->tag;",
        "x->slot_unit[use->slot] == use->id;",
        ways="--wire",
    ),
    Fault(
        "gathers are not landed before a wait for the host",
        WIRE_WAIT,
        "    FSDPC_TRY(fsdpc_comm_land_before(x->comm, UINT64_MAX)); /* [Note: no deadlock] */\n",
        "",
        ways="--wire",
    ),
    Fault(
        "ranks of a host that begin different flights do not see that",
        WIRE_WAIT,
        "        if (disagree(x, next)) {",
        "        if (false && disagree(x, next)) {",
        ways="--wire",
    ),
    Fault(
        "a turn is said without a change",
        WIRE_WAIT,
        "        fsdpc_wire_say_change(x);\n",
        "",
        ways="--wire",
    ),
    Fault(
        "a change wakes nobody of the host",
        WIRE_HOST,
        "    fsdpc_shm_wake(fsdpc_wire_changes(x));\n",
        "",
        ways="--wire",
    ),
    Fault(
        "gradients are summed before the host's ranks have packed theirs",
        WIRE_REDUCE,
        "            FSDPC_TRY(fsdpc_wire_host_wait(x, FSDPC_WIRE_PACKED,",
        "            FSDPC_TRY(true ? 0 : fsdpc_wire_host_wait(x, FSDPC_WIRE_PACKED,",
        ways="--wire",
    ),
    Fault(
        "a reduce buffer is packed while the host's ranks read it",
        WIRE_REDUCE,
        "    return x->wire->host ? fsdpc_wire_host_wait(x, FSDPC_WIRE_READ,",
        "    return false ? fsdpc_wire_host_wait(x, FSDPC_WIRE_READ,",
        ways="--wire",
    ),
    Fault(
        "used bits of the last rank are left out",
        WIRE_REDUCE,
        "    for (int r = 1; r < x->world; r++) {",
        "    for (int r = 1; r < x->world - 1; r++) {",
        ways="--wire",
    ),
    Fault(
        "numbers of weights in marks not compared",
        "exchange/exchange_wire_marks.c",
        "        if (other != own && fsdpc_weights_alike(x, r, own, other)) {",
        "        if (false && other != own && fsdpc_weights_alike(x, r, own, other)) {",
        ways="--wire",
    ),
    Fault(
        "ranks with other marks read each other's data",
        FLIGHT,
        "    return memcmp(&flight->marks[rank], &flight->marks[flight->comm->rank],\n"
        "                  offsetof(fsdpc_mark, note)) == 0;",
        "    return rank >= 0 || flight;",
        ways="--wire",
    ),
    Fault(
        "sums that changed after their swap are not swapped again",
        REPLICAS,
        "    return s->used[i] && (s->flags[i] & CHANGED);",
        "    (void)s, (void)i;\n    return false;",
        ways="--replicas",
    ),
    Fault(
        "a replica swaps only what it has used itself",
        REPLICAS,
        "        s->flags[i] |= *from++;",
        "        s->flags[i] |= *from++ & 0;",
        ways="--replicas",
    ),
    Fault(
        "used parameters of the other replicas are left out",
        REPLICAS,
        "            unit->grads.used[p] |= *from++;",
        "            unit->grads.used[p] |= *from++ & 0;",
        ways="--replicas",
    ),
    Fault(
        "used parameters of the last replica are left out",
        REPLICAS,
        "    for (size_t r = 0; r < world; r++) {\n        read_record",
        "    for (size_t r = 0; r + 1 < world; r++) {\n        read_record",
        ways="--replicas",
    ),
    Fault(
        "units have one key for their swaps",
        REPLICAS,
        "        if (s->units[i]->swap.key == 0) {",
        "        s->units[i]->swap.key = i ? s->units[0]->swap.key : 0;\n"
        "        if (s->units[i]->swap.key == 0) {",
        ways="--replicas",
    ),
    Fault(
        "replicas add in an order of their own",
        REPLICAS,
        "landed + bytes * (size_t)(r < own ? r : r - 1) + share.offset;",
        "landed + bytes * (size_t)(r < own ? r : own ? r - 1 : count - 1 - r) + share.offset;",
        ways="--replicas",
    ),
    Fault(
        "a replica leaves out its own sum",
        REPLICAS,
        "item * (size_t)(share.numel * own);",
        "item * (size_t)(share.numel * (own ? 0 : 1));",
        ways="--replicas",
    ),
    Fault(
        "the sums of the replicas are read before they have landed",
        REPLICAS,
        "!swap->gathers && fsdpc_flight_is_here(swap->flight) ? begin_gather(unit)\n",
        "!swap->gathers ? begin_gather(unit)\n",
        ways="--replicas",
    ),
    Fault(
        "a unit that no rank of this replica ran sends what was there before",
        REPLICAS,
        "    return unit->grads.partial_any\n"
        "               ? FSDPC_OK\n"
        "               : fsdpc_device",
        "    return true\n               ? FSDPC_OK\n               : fsdpc_device",
        ways="--replicas",
    ),
    Fault(
        "the last share of a sum is not taken",
        REPLICAS,
        "    for (int r = 0; left > 0; r++, left",
        "    for (int r = 0; left > share.numel; r++, left",
        ways="--replicas",
    ),
    Fault(
        "partial sums of a backward count in the next one",
        REPLICAS,
        "        s.units[i]->grads.partial_any = false;",
        "        s.units[i]->grads.partial_any = true;",
        ways="--replicas",
    ),
    Fault(
        "a flight by key is taken for here when it has begun",
        FLIGHT,
        "        if (atomic_load(word) != begun.words[0]) {",
        "        if (false && atomic_load(word) != begun.words[0]) {",
        ways="--replicas",
    ),
    Fault(
        "memory of a flight that has failed while it began is freed",
        FLIGHT,
        "        comm->lost = !fsdpc_flight_free(*out) || comm->lost;",
        "        fsdpc_flight_free(*out);",
        mended=True,
        ways="--replicas",
    ),
    Fault(
        "unfreezing: who still evaluates is taken for one that trains",
        PAUSE,
        "    atomic_store(&own->thaws, ((tag >> FSDPC_PASS_BITS) + 1) << FSDPC_PASS_BITS);",
        "    atomic_store(&own->thaws, x->tag + 1);",
        ways="--thaws",
    ),
    Fault(
        "unfreezing: who evaluates waits for weights of who does not",
        PAUSE,
        "    atomic_store(&own->ready, tag);\n    fsdpc_shared_notify(x);\n    return FSDPC_OK;",
        "    fsdpc_shared_notify(x);\n    return FSDPC_OK;",
        ways="--thaws",
    ),
    Fault(
        "unfreezing: waits do not look for it",
        PAUSE,
        "    FSDPC_TRY(check_thaws(x));",
        "    FSDPC_TRY(false ? check_thaws(x) : FSDPC_OK);",
        ways="--thaws",
    ),
    Fault(
        "unfreezing: no samples are published",
        TREE,
        "    begin_pass(tree, last_pass(tree->pass), false);",
        "    begin_pass(tree, last_pass(tree->pass), true);",
        ways="--thaws",
    ),
    Fault(
        "unfreezing: the training pass may read the weights",
        TREE,
        "    begin_pass(tree, last_pass(tree->pass), false);",
        "    begin_pass(tree, next_pass(tree->pass, true), false);",
        ways="--thaws",
    ),
    Fault(
        "unfreezing: ranks of a wire do not compare it",
        "exchange/exchange_wire_marks.c",
        "        return thaw_mismatch(x, own, rank, other);",
        "        return true ? FSDPC_OK : thaw_mismatch(x, own, rank, other);",
        ways="--thaws",
    ),
    Fault(
        "ranks of a wire do not see that they run different models",
        "exchange/exchange_wire_marks.c",
        "    if (mine.model != theirs.model) {",
        "    if (false && mine.model != theirs.model) {",
        ways="--twins --wire",
    ),
    Fault(
        "unfreezing: the marks of used parameters begin set",
        "unit/unit_thaw.c",
        "    put_buffers(unit, &(struct buffers){0});\n",
        "    put_buffers(unit, &(struct buffers){0});\n"
        "    memset(unit->grads.used, 1, (size_t)unit->layout->param_count);\n",
        ways="--thaws",
    ),
]


def stale() -> list[str]:
    """Return a line for each fault that cannot be planted because the source has changed."""
    times = {f: (ROOT / "csrc" / f.file).read_text().count(f.old) for f in FAULTS}
    return [f"{f.name}: its text occurs {n} times in {f.file}" for f, n in times.items() if n != 1]


def mended() -> dict[str, str]:
    """Map the name of each fault in mended.list to a text: the fault's seed and its options."""
    rows = [line.split(" ", 2) for line in MENDED.read_text().splitlines() if line[0] != "#"]
    rows = [row if row[1][:2] == "--" else [row[0], "", " ".join(row[1:])] for row in rows]
    return {name: f"{seed} {way}".strip() for seed, way, name in rows}


def run(command: list[str], most_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=most_s
    )


@cache
def plant(fault: Fault, build: Path) -> Path:
    """Build a core with the fault: compile the changed file, and link it with the other objects."""
    source = (ROOT / "csrc" / fault.file).read_text()
    folder = build / f"fault-{FAULTS.index(fault)}"
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / Path(fault.file).name
    changed.write_text(source.replace(fault.old, fault.new))
    compiler, *flags = os.environ["CLUSTER_CC"].split()
    made, library = folder / "changed.o", folder / "core.so"
    link = ["-shared", "-Wl,-z,now", "-Wl,-Bsymbolic", *os.environ["CLUSTER_WRAPS"].split()]
    # The changed file comes first, so that the linker ignores the unchanged file in the archive.
    parts = [str(build / "program.o"), str(made), str(build / "core.a")]
    shares = fault.file.split("/")[0] in ("shm", "comm", "exchange")
    points = ["-include", "tests/simcluster/points.h"] if shares else []
    for command in (
        [compiler, *flags, "-w", "-fPIC", *points, "-c", str(changed), "-o", str(made)],
        [compiler, *link, *parts, "-o", str(library), "-lm"],
    ):
        result = run(command)
        if result.returncode:
            sys.exit(f"{fault.name}: {result.stderr}")
    return library


def c_tests(build: Path) -> list[Path]:
    """Compile the C tests of the folders that faults are planted in; return their object files."""
    made = []
    for name in C_TESTS:
        made.append(build / f"test_{name}.o")
        command = [*os.environ["CLUSTER_CC"].split(), "-w", "-c", f"tests/c/test_{name}.c"]
        result = run([*command, "-o", str(made[-1])])
        if result.returncode:
            sys.exit(result.stderr)
    return made


def found_by_c_tests(fault: Fault, build: Path, tests: list[Path], core: Path) -> str:
    """Return the name of the first C test that fails with the fault, or "" if all tests pass."""
    folder = plant(fault, build).parent
    compiler, *flags = os.environ["CLUSTER_CC"].split()
    source, made = folder / Path(fault.file).name, folder / "plain.o"
    commands = [[compiler, *flags, "-w", "-c", str(source), "-o", str(made)]]
    for test in tests:
        parts = [str(test), str(made), str(core), "-o", str(folder / test.stem)]
        commands.append([compiler, *parts, "-pthread", "-ldl", "-lrt", "-lm"])
    for command in commands:
        result = run(command)
        if result.returncode:
            sys.exit(f"{fault.name}: {result.stderr}")
    for test in tests:
        try:
            failed = run([str(folder / test.stem)], C_TEST_S).returncode != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            return test.stem
    return ""


def compare_with_c_tests(faults: list[Fault], build: Path, jobs: int) -> None:
    """Print how many of the faults are found by the C tests with real processes and threads."""
    tests, core = c_tests(build), build.parent / "libcore.a"

    def one(fault: Fault) -> bool:
        found = found_by_c_tests(fault, build, tests, core)
        print(f"{found or '-':>14}  {fault.name}", flush=True)
        return found != ""

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, faults))
    print(f"{sum(found)} of {len(found)} faults found by the C tests of {', '.join(C_TESTS)}")


@dataclass
class Outcome:
    """The result of the search for a fault; `made` is a digest of the build and of the fault."""

    made: str
    tried: int = 0  # how many seeds, from seed 1 on, did not find the fault
    found: int = 0  # the seed that found the fault, or 0
    what: str = ""
    seconds: float = 0


def search(fault: Fault, build: Path, before: Outcome, most: int, end: float) -> Outcome:
    """Try seeds after `before.tried` up to `most`. On a timeout, return the counts of `before`."""
    library = plant(fault, build)
    first, begin = before.tried + 1, time.monotonic()
    command = [str(build / "simcluster"), str(library), "--until-found"]
    command += fault.ways.split()
    command += ["--first", str(first), "--count", str(most - before.tried)]
    tried, found, what = before.tried, 0, ""
    try:
        result = run(command, min(600 + most - before.tried, max(end - begin, 0.1)))
    except subprocess.TimeoutExpired:
        return replace(before, what="no end in time")
    else:
        lines = [line for line in result.stdout.splitlines() if line.startswith("VIOLATION ")]
        what = lines[0].removeprefix("VIOLATION ") if lines else ""
        last = result.stdout.split()[-2:]
        if result.returncode < 0 and what.startswith("a crash"):
            found = int(what.split()[-1])
        elif result.returncode == 0 and last[0] == "found":
            found = tried + int(last[1])
        elif result.returncode == 1:
            tried = most
        else:
            sys.exit(f"{fault.name}: {result.stdout} {result.stderr}")
    return Outcome(before.made, tried, found, what, before.seconds + time.monotonic() - begin)


class Results:
    """The outcomes of all faults, saved after each search so that a run can be resumed."""

    def __init__(self, path: Path, build: Path, end: float) -> None:
        self.path, self.build, self.end = path, build, end
        self.common = b"".join(
            (build / name).read_bytes() for name in ("simcluster", "program.o", "core.a")
        )
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.of = {name: Outcome(**fields) for name, fields in kept.items()}
        self.lock = threading.Lock()

    def before(self, fault: Fault) -> Outcome:
        text = f"{fault.file}\n{fault.old}\n{fault.new}".encode()
        made = hashlib.sha256(self.common + text).hexdigest()[:16]
        kept = self.of.get(fault.name)
        return kept if kept and kept.made == made else Outcome(made)

    def merge(self, path: Path) -> None:
        """Add the outcomes that another run of the same build has saved."""
        self.of |= {name: Outcome(**each) for name, each in json.loads(path.read_text()).items()}

    def search(self, fault: Fault, most: int) -> None:
        outcome = self.before(fault)
        while not outcome.found and outcome.tried < most and time.monotonic() < self.end:
            before = outcome
            until = min(most, before.tried + CHUNK)
            outcome = search(fault, self.build, before, until, self.end)
            self.keep(fault, outcome, show=outcome.tried in (before.tried, most))
            if not outcome.found and outcome.tried == before.tried:
                return

    def keep(self, fault: Fault, outcome: Outcome, show: bool) -> None:
        with self.lock:
            self.of[fault.name] = outcome
            kept = {name: asdict(each) for name, each in self.of.items()}
            new = self.path.with_suffix(".new")  # so that a killed run leaves a complete file
            new.write_text(json.dumps(kept, indent=1))
            new.replace(self.path)
            if show:
                shown = outcome.found or f"> {outcome.tried}"
                print(f"{shown:>8}  {fault.name:60}  {outcome.what[:90]}", flush=True)


def report(faults: list[Fault], results: Results, count: int) -> int:
    seeds = []
    for fault in faults:
        outcome = results.before(fault)
        seeds += [outcome.found] * (outcome.found > 0)
        print(f"{outcome.found or '-':>6}  {fault.name:60}  {outcome.what[:90]}")
    print(f"{len(seeds)} of {len(faults)} faults found within {count} seeds; {within(seeds)}")
    return len(seeds)


def within(seeds: list[int]) -> str:
    steps = (10, 100, 1000)
    return ", ".join(f"{sum(seed <= most for seed in seeds)} within {most}" for most in steps)


def write(results: Results, count: int) -> None:
    """Write all faults' seeds to decision 41, and the seeds of mended faults to mended.list."""
    of = {fault: results.before(fault) for fault in FAULTS}
    # A fault that this build has not found, perhaps because it was not tried, keeps its old seed.
    new = {f.name: f"{of[f].found} {f.ways}".strip() for f in FAULTS if f.mended and of[f].found}
    kept = mended() | new
    rows = [f"{kept[f.name]} {f.name}\n" for f in FAULTS if f.name in kept]
    MENDED.write_text(MENDED_HEAD + "".join(rows))
    seeds = [outcome.found for outcome in of.values() if outcome.found]
    lines = [f"{len(seeds)} of {len(of)} within {count} seeds: {within(seeds)}.", ""]
    lines += ["| planted fault | file | seeds |", "| --- | --- | --- |"]
    for fault in sorted(FAULTS, key=lambda fault: (fault.file, of[fault].found, fault.name)):
        tried = f"> {of[fault].tried}" if of[fault].tried else "not tried"
        shown = of[fault].found or tried
        lines.append(f"| {fault.name} | `{Path(fault.file).name}` | {shown} |")
    begin, rest = DECISION.read_text().split(BEGIN, 1)
    text = "\n".join(lines)
    DECISION.write_text(f"{begin}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


def replay(build: Path, fault: Fault, seed: str) -> bool:
    """Return whether the seed still finds the mended fault when that fault is planted again."""
    command = [str(build / "simcluster"), str(plant(fault, build)), "--until-found", "--quiet"]
    first, *way = seed.split()
    code = run([*command, *way, "--first", first, "--count", "1"]).returncode
    found = code == 0 or code < 0  # 0: a violation; negative: a crash
    print(f"{seed:>6}  {fault.name:60}  {'found' if found else 'NOT FOUND'}", flush=True)
    return found


def replay_mended(build: Path, jobs: int) -> int:
    of = {fault.name: fault for fault in FAULTS}
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda row: replay(build, of[row[0]], row[1]), mended().items()))
    return not found or not all(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="faults whose names match this")
    parser.add_argument("--shard", default="1/1", help="2/8: the second of eight parts of them")
    parser.add_argument("--seconds", type=float, default=1e9, help="search no longer than that")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="faults.json of others")
    parser.add_argument("--least", type=float, default=0.98, help="share that must be found")
    parser.add_argument("--write", action="store_true", help="write the seeds into the decision")
    parser.add_argument("--c-tests", action="store_true", help="count what C tests find instead")
    parser.add_argument("--mended", action="store_true", help="replay the seeds of mended.list")
    args = parser.parse_args()
    build = args.build.resolve()
    if args.mended:
        sys.exit(replay_mended(build, args.jobs))
    shard, shards = map(int, args.shard.split("/"))
    faults = [fault for fault in FAULTS if re.search(args.only, fault.name)][shard - 1 :: shards]
    if stale():
        sys.exit("\n".join(stale()))
    if args.c_tests:
        return compare_with_c_tests(faults, build, args.jobs)
    results = Results(build / "faults.json", build, time.monotonic() + args.seconds)
    for path in args.merge:
        results.merge(path)
    for most in sorted({min(args.count, 300), min(args.count, 3000), args.count}):
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda fault, most=most: results.search(fault, most), faults))
    if args.write:
        write(results, args.count)
    sys.exit(report(faults, results, args.count) < args.least * len(faults))


if __name__ == "__main__":
    main()
