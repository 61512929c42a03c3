/* A small model of the schedule. Its units share two gather slots and two reduce slots. It has three streams.
 *
 * The model does on the driver what a training step does (design: docs and csrc/exchange*). It gathers each
 * unit into its slot before it uses the unit, gathers again for backward, packs and reduces gradients, and
 * steps. Every wait, record, map and unmap that the real code needs is a numbered call of the driver, so that
 * a fault can be planted by skipping that call. Faults that add, move or change calls are switches of the
 * model.
 */
#ifndef SIMGPU_MODEL_H
#define SIMGPU_MODEL_H

#include "driver/simgpu.h"

enum { MODEL_UNITS = 12, MODEL_SLOTS = 2, MODEL_REDUCES = 2, MODEL_FLOATS = 64, MODEL_STEPS = 3 };
enum { MODEL_GRANULE = 4096 };

/* The sites of the schedule's calls. A planted fault names one of them. */
enum model_site {
    SITE_NONE,
    SITE_GATHER_WAITS_FOR_READER, /* the gather stream waits for the slot's last reader */
    SITE_GATHER_WAITS_FOR_STEP,   /* the gather stream waits for the shards that the step writes */
    SITE_USE_WAITS_FOR_GATHER,    /* the compute stream waits for the gather */
    SITE_PACK_WAITS_FOR_REDUCE,   /* the compute stream waits for the reduce slot's last reader */
    SITE_REDUCE_WAITS_FOR_PACK,   /* the reduce stream waits for the packed gradients */
    SITE_STEP_WAITS_FOR_REDUCE,   /* the compute stream waits for the last sum of each slot */
    SITE_HOST_WAITS_FOR_LOSS,     /* the processor waits before it reads the loss */
    SITE_HOST_WAITS_BEFORE_REMAP, /* the processor waits before a range gets other memory */
    SITE_HOST_WAITS_BEFORE_END,   /* the processor waits before it frees memory */
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
    /* The faults that follow do not skip calls: they add, move or change calls. */
    SITE_WRONG_SLOT,         /* the unit takes the other slot */
    SITE_WRONG_REDUCE_SLOT,  /* the unit packs into the other reduce slot */
    SITE_RELEASED_TOO_EARLY, /* `released` is recorded before the slot's last reader */
    SITE_WAITED_TOO_EARLY,   /* the wait comes before the record that it is for */
    SITE_FREED_IN_STEP,      /* a slot's memory is unmapped while the slot is gathered into */
    SITE_COUNT
};

typedef struct model_fault {
    enum model_site site;
    int step, unit;
    bool backward;
} model_fault;

/* Runs MODEL_STEPS steps with at most one fault, on a fresh simulator. Returns false if a call of the driver
 * failed; even then, `weights` has the final weights as far as they could be read. */
bool model_run(const model_fault *fault, float *weights, float *loss, char *error,
               size_t error_bytes);

#endif
