/* A small model of the schedule: units over two gather slots and two reduce slots, three streams.
 *
 * It does on the driver what a training step does (design: docs and csrc/exchange*): gather each
 * unit into its slot before use, use it, gather again for backward, pack gradients, reduce them,
 * step. Every wait, record, map and unmap that the real code needs is a numbered call of the
 * driver, so a fault is planted by skipping that call; faults that are another order of calls are
 * switches here.
 */
#ifndef SIMGPU_MODEL_H
#define SIMGPU_MODEL_H

#include "driver/simgpu.h"

enum { MODEL_UNITS = 12, MODEL_SLOTS = 2, MODEL_REDUCES = 2, MODEL_FLOATS = 64, MODEL_STEPS = 3 };
enum { MODEL_GRANULE = 4096 };

/* Where a call stands in the schedule: what a planted fault names. */
enum model_site {
    SITE_NONE,
    SITE_GATHER_WAITS_FOR_READER, /* gather stream: the slot's last reader */
    SITE_GATHER_WAITS_FOR_STEP,   /* gather stream: the optimizer wrote the shards */
    SITE_USE_WAITS_FOR_GATHER,    /* compute stream */
    SITE_PACK_WAITS_FOR_REDUCE,   /* compute stream: the reduce slot's last reader */
    SITE_REDUCE_WAITS_FOR_PACK,   /* reduce stream */
    SITE_STEP_WAITS_FOR_REDUCE,   /* compute stream: the last sum */
    SITE_HOST_WAITS_FOR_LOSS,     /* the processor, before it reads the loss */
    SITE_HOST_WAITS_BEFORE_REMAP, /* the processor, before a range gets other memory */
    SITE_HOST_WAITS_BEFORE_END,   /* the processor, before it takes memory away */
    SITE_RECORD_GATHERED,
    SITE_RECORD_RELEASED,
    SITE_RECORD_PACKED,
    SITE_RECORD_REDUCED,
    SITE_RECORD_STEPPED,
    SITE_REMAP_UNMAP,
    SITE_REMAP_MAP,
    SITE_REMAP_ACCESS,
    SITE_END_UNMAP,
    SITE_END_RELEASE,
    SITE_END_EVENT,
    /* other orders of calls */
    SITE_WRONG_SLOT,         /* the unit takes the other slot */
    SITE_WRONG_REDUCE_SLOT,  /* the unit packs into the other reduce slot */
    SITE_RELEASED_TOO_EARLY, /* released is recorded before the last reader */
    SITE_WAITED_TOO_EARLY,   /* the wait comes before the record that it is for */
    SITE_FREED_IN_STEP,      /* a slot's memory is freed while it is gathered into */
    SITE_COUNT
};

typedef struct model_fault {
    enum model_site site;
    int step, unit;
    bool backward;
} model_fault;

/* Runs MODEL_STEPS steps with at most one fault, on a fresh simulator. False: a call of the driver failed;
 * the final weights are in `weights` then as far as they can be. */
bool model_run(const model_fault *fault, float *weights, float *loss, char *error,
               size_t error_bytes);

#endif
