/* Included before every file of the core that ranks share memory through, when the file is compiled for the
 * simulated cluster: each atomic access becomes a point at which another rank may run.
 *
 * All accesses are sequentially consistent here, whatever order the source names. A point lies before each access,
 * and after each one that writes, so that what follows a publication can be late as well as what precedes it.
 */
#ifndef FSDPC_SIMCLUSTER_POINTS_H
#define FSDPC_SIMCLUSTER_POINTS_H

#include <stdatomic.h>

void sim_point(const char *place);

#define SIM_TEXT_OF(value) #value
#define SIM_TEXT(value) SIM_TEXT_OF(value)
#define SIM_HERE() sim_point(__FILE__ ":" SIM_TEXT(__LINE__))

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange
#undef atomic_compare_exchange_strong
#undef atomic_compare_exchange_weak
#undef atomic_fetch_add
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub
#undef atomic_fetch_or

#define atomic_load(at)                                      \
    __extension__({                                          \
        SIM_HERE();                                          \
        __auto_type sim_at_ = (at);                          \
        __typeof__((void)0, *sim_at_) sim_got_;              \
        __atomic_load(sim_at_, &sim_got_, __ATOMIC_SEQ_CST); \
        sim_got_;                                            \
    })
#define atomic_store(at, value)                               \
    __extension__({                                           \
        __auto_type sim_to_ = (at);                           \
        __typeof__((void)0, *sim_to_) sim_put_ = (value);     \
        SIM_HERE();                                           \
        __atomic_store(sim_to_, &sim_put_, __ATOMIC_SEQ_CST); \
        SIM_HERE();                                           \
    })
#define SIM_CHANGE(operation, at, value)                                      \
    __extension__({                                                           \
        SIM_HERE();                                                           \
        __auto_type sim_before_ = operation((at), (value), __ATOMIC_SEQ_CST); \
        SIM_HERE();                                                           \
        sim_before_;                                                          \
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
        _Bool sim_done_ = __atomic_compare_exchange(sim_to_, (expected), &sim_put_, 0,   \
                                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        SIM_HERE();                                                                      \
        sim_done_;                                                                       \
    })
#define atomic_compare_exchange_weak(at, expected, value) \
    atomic_compare_exchange_strong(at, expected, value)
#define atomic_load_explicit(at, order) atomic_load(at)
#define atomic_store_explicit(at, value, order) atomic_store(at, value)
#define atomic_fetch_add_explicit(at, value, order) atomic_fetch_add(at, value)

#endif
