/* Vector clocks, which show whether something orders two accesses to the same bytes.
 *
 * The history of a block of physical memory is a sorted list of segments. A segment holds the last write and,
 * for each stream, the last read since that write. An access by a task is ordered behind an earlier access if
 * the task's clock has reached the time of the earlier access. Work runs in an order that respects its
 * clocks, so each access need only be compared with earlier accesses. A read replaces only the last read of
 * the same stream. A write replaces the whole history of its bytes: each earlier access is ordered before the
 * write, or has been reported. So no race is lost.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

void
sim_clock_join(uint64_t *into, const uint64_t *other)
{
    for (int i = 0; i < SIM_ACTORS; i++) {
        into[i] = into[i] > other[i] ? into[i] : other[i];
    }
}

static int
first_behind(const sim_space *space, uint64_t lo)
{
    int from = 0, to = space->count;
    while (from < to) {
        int middle = (from + to) / 2;
        if (space->segments[middle].hi <= lo) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

static sim_segment *
insert(sim_space *space, int at, sim_segment segment)
{
    space->segments =
        sim_grow(space->segments, space->count, &space->capacity, sizeof *space->segments);
    memmove(&space->segments[at + 1], &space->segments[at],
            (size_t)(space->count - at) * sizeof *space->segments);
    space->segments[at] = segment;
    space->count++;
    return &space->segments[at];
}

/* Cuts segments so that none lies on both sides of `at`. */
static void
cut(sim_space *space, uint64_t at)
{
    int i = first_behind(space, at);
    if (i == space->count || space->segments[i].lo >= at) {
        return;
    }
    sim_segment right = space->segments[i];
    right.lo = at;
    if (right.read_count) {
        right.read_capacity = right.read_count;
        right.reads = sim_alloc((size_t)right.read_count, sizeof *right.reads);
        memcpy(right.reads, space->segments[i].reads,
               (size_t)right.read_count * sizeof *right.reads);
    } else {
        right.reads = NULL;
        right.read_capacity = 0;
    }
    space->segments[i].hi = at;
    insert(space, i + 1, right);
}

/* --- the check ---------------------------------------------------------------------------------- */

static bool
ordered(const sim_mark *mark, const simgpu_task *task)
{
    return mark->actor == task->actor || mark->time <= task->clock[mark->actor];
}

static void
tell(const sim_segment *common, const sim_mark *mark, bool mark_wrote, const simgpu_task *task,
     bool write, const char *label)
{
    char alias[96] = "";
    if (mark->label != label) {
        snprintf(alias, sizeof alias, " as %s", mark->label);
    }
    sim_say(true, "%s, bytes [%llu, %llu): %s by %s (%s)%s, %s by %s (%s), nothing orders them",
            label, (unsigned long long)common->lo, (unsigned long long)common->hi,
            mark_wrote ? "written" : "read", sim_actor_name(mark->actor), mark->what, alias,
            write ? "written" : "read", sim_actor_name(task->actor), task->what);
}

static void
check(const sim_segment *segment, uint64_t lo, uint64_t hi, const simgpu_task *task, bool write,
      const char *label)
{
    sim_segment common = {.lo = segment->lo > lo ? segment->lo : lo,
                          .hi = segment->hi < hi ? segment->hi : hi};
    if (segment->written && !ordered(&segment->write, task)) {
        tell(&common, &segment->write, true, task, write, label);
    }
    for (int i = 0; write && i < segment->read_count; i++) {
        if (!ordered(&segment->reads[i], task)) {
            tell(&common, &segment->reads[i], false, task, write, label);
        }
    }
}

static void
keep_read(sim_segment *segment, sim_mark mark)
{
    for (int i = 0; i < segment->read_count; i++) {
        if (segment->reads[i].actor == mark.actor) {
            segment->reads[i] = mark;
            return;
        }
    }
    segment->reads =
        sim_grow(segment->reads, segment->read_count, &segment->read_capacity, sizeof mark);
    segment->reads[segment->read_count++] = mark;
}

/* Replaces the history by the write: each earlier access is ordered before the write, or has been
 * reported. */
static void
keep_write(sim_space *space, uint64_t lo, uint64_t hi, sim_mark mark)
{
    int from = first_behind(space, lo), to = from;
    while (to < space->count && space->segments[to].lo < hi) {
        free(space->segments[to++].reads);
    }
    if (to > from) {
        memmove(&space->segments[from], &space->segments[to],
                (size_t)(space->count - to) * sizeof *space->segments);
        space->count -= to - from;
    }
    insert(space, from, (sim_segment){.lo = lo, .hi = hi, .written = true, .write = mark});
}

static void
keep_reads(sim_space *space, uint64_t lo, uint64_t hi, sim_mark mark)
{
    while (lo < hi) {
        int i = first_behind(space, lo);
        sim_segment *segment = i < space->count ? &space->segments[i] : NULL;
        if (!segment || segment->lo > lo) {
            uint64_t end = segment && segment->lo < hi ? segment->lo : hi;
            segment = insert(space, i, (sim_segment){.lo = lo, .hi = end});
        }
        keep_read(segment, mark);
        lo = segment->hi;
    }
}

void
sim_space_access(sim_space *space, uint64_t lo, uint64_t hi, const simgpu_task *task, bool write,
                 const char *label)
{
    sim_mark mark = {.actor = task->actor, .time = task->time, .what = task->what, .label = label};
    for (int i = first_behind(space, lo); i < space->count && space->segments[i].lo < hi; i++) {
        check(&space->segments[i], lo, hi, task, write, label);
    }
    cut(space, lo);
    cut(space, hi);
    if (write) {
        keep_write(space, lo, hi, mark);
    } else {
        keep_reads(space, lo, hi, mark);
    }
}

void
sim_space_free(sim_space *space)
{
    for (int i = 0; i < space->count; i++) {
        free(space->segments[i].reads);
    }
    free(space->segments);
    *space = (sim_space){0};
}
