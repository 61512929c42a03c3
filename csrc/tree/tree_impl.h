/* Internal types and functions of a tree, for tree*.c. */
#ifndef FSDPC_TREE_IMPL_H
#define FSDPC_TREE_IMPL_H

#include "tree/tree.h"
#include "tree/tree_plan.h"
#include "unit/grad.h"
#include "unit/grad_slots.h"

struct fsdpc_node {
    fsdpc_unit *unit;
    fsdpc_exchange *exchange;
    int depth;
    bool held;   /* the tree holds one reference until the unit's backward is done */
    bool kept;   /* held also after the backward, for a second one (retain_graph) */
    int running; /* forwards of the unit that have begun and not ended */
    bool open;   /* entered by this backward and not done yet */
    int below;   /* if `open`: the open unit that was entered before this one, or -1 */
    uint64_t first,
        last;      /* when its first forward began and its last one ended, on `clock`; 0: never */
    bool done;     /* its gradients have been complete in this backward */
    bool complete; /* gradients are complete, reduction is due or waits for its turn */
    bool reduced;  /* its reduction was begun in this backward */
    bool taken;    /* its sum was taken before the end of this backward: see next_summed */
    bool late;     /* its sum is still being copied to host memory: see fsdpc_tree_next_late */
    int order;     /* position in the tree's `order`; -1: the unit is not in that list */
};

struct fsdpc_tree {
    struct fsdpc_node *nodes;
    int count;
    fsdpc_exchange **exchanges;
    fsdpc_grad_slots **grad_slots; /* per exchange: slots of units that step in backward, or NULL */
    int exchange_count;
    enum fsdpc_prefetch backward_prefetch;
    bool forward_prefetch;
    int gather_slots, reduce_slots; /* gather_slots 0: the default of each communicator */
    bool poison, trust_order;
    uint64_t swapped_bytes; /* bytes sent to other replicas in the background */
    bool replicates;        /* some unit's gradients are also summed over replicas */
    int *order; /* units in order of their first forward since the last backward ended */
    int order_count;
    int *last_order; /* `order` when a backward last ended: forward prefetch follows it */
    int last_order_count;
    /* Number of synchronised backwards that have ended; number of outermost forwards since the last one. */
    uint64_t backwards, forwards;
    uint64_t pass;     /* the number in the latest pass's tag (exchange.h) */
    bool without_grad; /* the latest pass was begun as one that no backward follows */
    bool touched;      /* fsdpc_tree_touch */
    bool in_backward, defer_reduces;
    int opened;         /* the open unit that was entered last, or -1 */
    uint64_t clock;     /* number of begins and ends of forwards so far: see `first` and `last` */
    bool steps_inside;  /* units may be stepped before their backward has ended */
    int complete_count; /* nodes whose reduction is due or waits for its turn */
    bool takes_turns;   /* some unit must be reduced in one order on all ranks */
    enum fsdpc_phase phase;
    fsdpc_trace *trace;
    struct fsdpc_norm_room *norm_room; /* made by the first clip */
};

/* tree.c */
/* Sets how many references the end of a backward leaves: one per forward in progress and per kept hold. */
void fsdpc_tree_set_floor(struct fsdpc_node *node);
/* Returns how many of the next units may be gathered early: over a wire, one less than there are slots per
 * nesting level, but at least one; otherwise one. */
int fsdpc_tree_reach(const fsdpc_tree *tree, const struct fsdpc_node *node);
/* True if some unit's forward has begun and not ended. */
bool fsdpc_tree_in_forward(const fsdpc_tree *tree);
void fsdpc_tree_set_phase(fsdpc_tree *tree, enum fsdpc_phase phase);
/* Begins a pass on all exchanges. From then on this rank's master shards are final for the pass's tag. */
int fsdpc_tree_publish_tag(fsdpc_tree *tree);
/* Fails with FSDPC_E_STATE if an optimizer may have stepped this unit in the backward that is running.
 * Another rank may have stepped the unit as soon as all ranks have sent the unit's gradients, even if this
 * rank has not received all of these gradients yet. */
int fsdpc_tree_check_not_stepped(const fsdpc_tree *tree, const struct fsdpc_node *node);

/* tree_norm.c */
void fsdpc_tree_norm_free(fsdpc_tree *tree);

#endif
