/* The part of the DLPack binary interface (version 1) that fsdpc uses.
 *
 * The published standard fixes the layouts: field order, sizes and the meaning of codes must not
 * change. Only the names are fsdpc's own. See https://dmlc.github.io/dlpack/latest/c_api.html.
 */
#ifndef FSDPC_DLPACK_ABI_H
#define FSDPC_DLPACK_ABI_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1 };

/* Device types. The CPU can read and write the memory of all of them except DLPACK_DEVICE_CUDA. */
enum {
    DLPACK_DEVICE_CPU = 1,
    DLPACK_DEVICE_CUDA = 2,
    DLPACK_DEVICE_CUDA_HOST = 3,
    DLPACK_DEVICE_ROCM_HOST = 11
};

/* Bit of dlpack_versioned.flags. */
enum { DLPACK_FLAG_READ_ONLY = 1 };

typedef struct dlpack_tensor {
    void *data;
    struct {
        int32_t type;
        int32_t id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code;
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; before version 1.2 NULL means row-major */
    uint64_t byte_offset;
} dlpack_tensor;

/* The content of a capsule named "dltensor", or "used_dltensor" once it is consumed. */
typedef struct dlpack_managed {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *self);
} dlpack_managed;

typedef struct dlpack_version {
    uint32_t major;
    uint32_t minor;
} dlpack_version;

/* The content of a capsule named "dltensor_versioned", or "used_dltensor_versioned" once it is consumed. */
typedef struct dlpack_versioned {
    dlpack_version version;
    void *context;
    void (*deleter)(struct dlpack_versioned *self);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_versioned;

/* The content of a capsule named "dlpack_exchange_api", the attribute __dlpack_c_exchange_api__ of a type.
 * The functions return 0, or -1 with an exception set. `previous` points to the API of an older version. */
typedef struct dlpack_exchange {
    dlpack_version version;
    struct dlpack_exchange *previous;
    int (*allocate)(dlpack_tensor *like, dlpack_versioned **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*export_managed)(void *object, dlpack_versioned **out);
    int (*import_managed)(dlpack_versioned *tensor, void **out_object);
    /* This function may be NULL. *out is borrowed: it is valid while `object` exists and keeps its memory. */
    int (*borrow)(void *object, dlpack_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} dlpack_exchange;

#endif
