/* Tests of slots that the gradients of several units use in turn: which slot a unit gets, what orders two
 * units that use one slot on different streams, and what state a failure leaves. Training steps with such
 * slots are tested in dist/test_in_backward_gpu.py. */
#include "comm/comm.h"
#include "engine.h"
#include "gpu.h"
#include "unit/grad_slots.h"

enum { UNITS = 4 };

typedef struct subject {
    fsdpc_device *device;
    fsdpc_comm *comm;
    fsdpc_unit *units[UNITS];
    fsdpc_grad_slots *slots;
} subject;

static void
close_subject(subject *s)
{
    fsdpc_grad_slots_drop(s->slots);
    for (int i = 0; i < UNITS; i++) {
        fsdpc_unit_free(s->units[i]);
    }
    fsdpc_comm_free(s->comm);
}

/* The optimizer sees the third unit's gradients in a narrower dtype than that of their sums. The fourth unit
 * is much larger than the others. */
static subject
open_subject(int wanted)
{
    subject s = {0};
    REQUIRE_OK(fsdpc_device_cuda(0, &s.device));
    REQUIRE_OK(fsdpc_comm_self(s.device, &s.comm));
    for (int i = 0; i < UNITS; i++) {
        s.units[i] = engine_unit(s.comm, i == 1 ? 0 : i, "u", true);
    }
    if (wanted > 0) {
        REQUIRE_OK(fsdpc_grad_slots_share(s.units, UNITS, wanted, &s.slots));
    }
    return s;
}

/* Writes a gradient on the current stream. */
static void
write_grad(const subject *s, int unit)
{
    const fsdpc_unit *u = s->units[unit];
    REQUIRE_OK(fsdpc_device_poison(s->device, u->grad, FSDPC_F32, 100));
}

static void
slots_are_shared_where_that_is_less(void)
{
    subject s = open_subject(0);
    size_t all = 0;
    const void *own = s.units[0]->grad;
    for (int i = 0; i < UNITS; i++) {
        all += s.units[i]->footprint.grads_bytes;
    }
    REQUIRE_OK(fsdpc_grad_slots_share(s.units, UNITS, UNITS, &s.slots));
    CHECK(!s.slots && s.units[0]->grad == own && fsdpc_grad_slots_bytes(NULL) == 0);
    REQUIRE_OK(fsdpc_grad_slots_share(s.units, UNITS, 1, &s.slots));
    CHECK(s.slots && s.units[0]->grad != own);
    CHECK_INT(fsdpc_grad_slots_bytes(s.slots), s.units[3]->footprint.grads_bytes);
    CHECK(fsdpc_grad_slots_bytes(s.slots) < all);
    CHECK_INT(fsdpc_unit_get_memory(s.units[0]).grad, 0);
    CHECK(s.units[2]->grad_out && (char *)s.units[2]->grad_out >=
                                      (char *)s.units[2]->grad + s.units[2]->layout->grad_bytes);
    close_subject(&s);
    expect_no_reports();
}

static void
a_unit_takes_the_slot_it_had_or_a_free_one(void)
{
    bool moved;
    subject s = open_subject(1);
    const void *first = s.units[0]->grad;
    const size_t bytes = fsdpc_grad_slots_bytes(s.slots);
    for (int i = 0; i < UNITS; i++) {
        REQUIRE_OK(fsdpc_unit_take_slot(s.units[i], &moved));
        CHECK(!moved && s.units[i]->grad == first);
        REQUIRE_OK(fsdpc_unit_discard_grads(s.units[i]));
    }
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[0], &moved));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[0], &moved)); /* the unit holds the slot already */
    CHECK(!moved && s.units[0]->grad == first);
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[1], &moved));
    CHECK(moved && s.units[1]->grad != first);
    CHECK_INT(fsdpc_grad_slots_bytes(s.slots), bytes + s.units[1]->footprint.grads_bytes);
    REQUIRE_OK(fsdpc_unit_discard_grads(s.units[0]));
    REQUIRE_OK(fsdpc_unit_discard_grads(s.units[1]));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[1], &moved)); /* the unit gets its last slot again */
    CHECK(!moved && s.units[1]->grad != first);
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[3], &moved));
    CHECK(!moved && s.units[3]->grad == first); /* the other slot is too small for unit 3 */
    CHECK_INT(fsdpc_grad_slots_bytes(s.slots), bytes + s.units[1]->footprint.grads_bytes);
    close_subject(&s);
    expect_no_reports();
}

/* Two units use one slot on two streams. If the wait between them is left out (k = 1), the clocks report that
 * the second write is not ordered after the first. */
static int
two_streams(int k, int64_t *waits)
{
    bool moved;
    fsdpc_stream *other;
    subject s = open_subject(1);
    REQUIRE_OK(fsdpc_device_stream_new(s.device, false, &other));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[0], &moved));
    write_grad(&s, 0);
    REQUIRE_OK(fsdpc_unit_discard_grads(s.units[0]));
    fsdpc_device_use(s.device, other);
    *waits = simgpu_calls("cuStreamWaitEvent");
    REQUIRE(k == 0 || simgpu_skip("cuStreamWaitEvent", k));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[1], &moved));
    *waits = simgpu_calls("cuStreamWaitEvent") - *waits;
    write_grad(&s, 1);
    REQUIRE(simgpu_drain());
    const int found = simgpu_reports();
    const int64_t before = simgpu_calls("cuStreamWaitEvent");
    REQUIRE_OK(fsdpc_unit_discard_grads(s.units[1]));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[0], &moved));
    CHECK_INT(simgpu_calls("cuStreamWaitEvent"), before); /* no wait: the stream is the same */
    fsdpc_device_use(s.device, NULL);
    close_subject(&s);
    fsdpc_device_stream_free(s.device, other);
    return found;
}

static void
a_holder_on_another_stream_comes_later(void)
{
    int64_t waits;
    CHECK_INT(two_streams(0, &waits), 0);
    CHECK_INT(waits, 1);
    CHECK(two_streams(1, &waits) > 0);
}

static void
a_failure_names_the_unit_and_changes_nothing(void)
{
    bool moved;
    subject s = open_subject(0);
    const void *own = s.units[0]->grad;
    REQUIRE(simgpu_fail("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY));
    CHECK_ERROR(fsdpc_grad_slots_share(s.units, UNITS, 1, &s.slots), FSDPC_E_DEVMEM,
                "gradients of units that step in backward");
    CHECK(!s.slots && s.units[0]->grad == own && !s.units[0]->slots);
    REQUIRE_OK(fsdpc_grad_slots_share(s.units, UNITS, 1, &s.slots));
    REQUIRE_OK(fsdpc_unit_rename(s.units[1], "layers.7"));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[0], &moved));
    own = s.units[1]->grad;
    REQUIRE(simgpu_fail("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY));
    CHECK_ERROR(fsdpc_unit_take_slot(s.units[1], &moved), FSDPC_E_DEVMEM,
                "gradients of unit layers.7");
    CHECK(!moved && s.units[1]->grad == own);
    REQUIRE_OK(fsdpc_unit_discard_grads(s.units[0]));
    REQUIRE_OK(fsdpc_unit_take_slot(s.units[1], &moved));
    CHECK(!moved);
    close_subject(&s);
}

int
main(void)
{
    gpu_start();
    REQUIRE(simgpu_policy("lazy"));
    slots_are_shared_where_that_is_less();
    a_unit_takes_the_slot_it_had_or_a_free_one();
    a_failure_names_the_unit_and_changes_nothing();
    a_holder_on_another_stream_comes_later();
    return test_result();
}
