/* Turns each atomic access into a point at which another rank may run. The compiler includes this header
 * before each file of the core through which ranks share memory, when it compiles for the simulated cluster.
 *
 * A point is before each access and also after each write, so that other ranks can run on both sides of
 * a write. Accesses are sequentially consistent here, whatever order the source names, with one
 * exception: in some cases, other ranks see a store of a weaker order late. Late stores appear in order, and
 * before the rank's next sequentially consistent write or system call, as on x86-64.
 */
#ifndef FSDPC_SIMCLUSTER_POINTS_H
#define FSDPC_SIMCLUSTER_POINTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/pause.h"

/* A pause does nothing: other ranks run only at points, and pauses took a sixth of the simulation's time. */
#define fsdpc_pause() ((void)0)

void sim_point(const char *place);
/* Marks a point after a write to `at`. */
void sim_wrote(const char *place, const void *at);
void sim_store_late(void *to, const void *value, size_t bytes);
/* Reads the running fiber's late store at `from`; returns false if the fiber has no late store there. */
bool sim_load_late(const void *from, void *out, size_t bytes);
void sim_flush(void);
extern int sim_late_stores;

#define SIM_TEXT_OF(value) #value
#define SIM_TEXT(value) SIM_TEXT_OF(value)
#define SIM_PLACE __FILE__ ":" SIM_TEXT(__LINE__)
#define SIM_HERE() sim_point(SIM_PLACE)
#define SIM_AT(at) ((void *)(uintptr_t)(at))

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange
#undef atomic_exchange_explicit
#undef atomic_compare_exchange_strong
#undef atomic_compare_exchange_weak
#undef atomic_fetch_add
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub
#undef atomic_fetch_or

#define atomic_load(at)                                                                        \
    __extension__({                                                                            \
        SIM_HERE();                                                                            \
        __auto_type sim_at_ = (at);                                                            \
        __typeof__((void)0, *sim_at_) sim_got_;                                                \
        if (!sim_late_stores || !sim_load_late(SIM_AT(sim_at_), &sim_got_, sizeof sim_got_)) { \
            __atomic_load(sim_at_, &sim_got_, __ATOMIC_SEQ_CST);                               \
        }                                                                                      \
        sim_got_;                                                                              \
    })
#define atomic_store(at, value)                               \
    __extension__({                                           \
        __auto_type sim_to_ = (at);                           \
        __typeof__((void)0, *sim_to_) sim_put_ = (value);     \
        SIM_HERE();                                           \
        sim_flush();                                          \
        __atomic_store(sim_to_, &sim_put_, __ATOMIC_SEQ_CST); \
        sim_wrote(SIM_PLACE, SIM_AT(sim_to_));                \
    })
#define atomic_store_explicit(at, value, order)                      \
    __extension__({                                                  \
        __auto_type sim_to_ = (at);                                  \
        __typeof__((void)0, *sim_to_) sim_put_ = (value);            \
        SIM_HERE();                                                  \
        sim_store_late(SIM_AT(sim_to_), &sim_put_, sizeof sim_put_); \
        sim_wrote(SIM_PLACE, SIM_AT(sim_to_));                       \
    })
#define SIM_CHANGE(operation, at, value)                                         \
    __extension__({                                                              \
        SIM_HERE();                                                              \
        sim_flush();                                                             \
        __auto_type sim_on_ = (at);                                              \
        __auto_type sim_before_ = operation(sim_on_, (value), __ATOMIC_SEQ_CST); \
        sim_wrote(SIM_PLACE, SIM_AT(sim_on_));                                   \
        sim_before_;                                                             \
    })
#define atomic_exchange(at, value) SIM_CHANGE(sim_exchange, at, value)
#define sim_exchange(at, value, order)                              \
    __extension__({                                                 \
        __auto_type sim_to_ = (at);                                 \
        __typeof__((void)0, *sim_to_) sim_put_ = (value), sim_was_; \
        __atomic_exchange(sim_to_, &sim_put_, &sim_was_, order);    \
        sim_was_;                                                   \
    })
#define atomic_fetch_add(at, value) SIM_CHANGE(__atomic_fetch_add, at, value)
#define atomic_fetch_sub(at, value) SIM_CHANGE(__atomic_fetch_sub, at, value)
#define atomic_fetch_or(at, value) SIM_CHANGE(__atomic_fetch_or, at, value)
#define atomic_compare_exchange_strong(at, expected, value)                              \
    __extension__({                                                                      \
        __auto_type sim_to_ = (at);                                                      \
        __typeof__((void)0, *sim_to_) sim_put_ = (value);                                \
        SIM_HERE();                                                                      \
        sim_flush();                                                                     \
        _Bool sim_done_ = __atomic_compare_exchange(sim_to_, (expected), &sim_put_, 0,   \
                                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        sim_wrote(SIM_PLACE, SIM_AT(sim_to_));                                           \
        sim_done_;                                                                       \
    })
#define atomic_compare_exchange_weak(at, expected, value) \
    atomic_compare_exchange_strong(at, expected, value)
#define atomic_load_explicit(at, order) atomic_load(at)
#define atomic_exchange_explicit(at, value, order) atomic_exchange(at, value)
#define atomic_fetch_add_explicit(at, value, order) atomic_fetch_add(at, value)

#endif
