/* Declarations of the NCCL functions that we call, without NCCL's header. NCCL is loaded at run time.
 *
 * The name libnccl.so.2 without a folder resolves to the copy that torch has loaded. FSDPC_LIBNCCL names
 * another file, which is loaded with RTLD_DEEPBIND, so that its calls stay within that file. Types and
 * prototypes are NCCL's stable binary interface. The configuration struct is that of 2.28; older and newer
 * libraries accept it, because it holds its own size and version.
 */
#ifndef FSDPC_NCCL_API_H
#define FSDPC_NCCL_API_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "device/cuda_driver.h"
#include "base/dtype.h"

typedef int fsdpc_nccl_result;
typedef int fsdpc_nccl_type; /* of elements */
typedef int fsdpc_nccl_op;
typedef struct ncclComm *fsdpc_nccl_comm;
typedef struct ncclWindow_vidmem *fsdpc_nccl_window;

enum { FSDPC_NCCL_ID_BYTES = 128 };
typedef struct fsdpc_nccl_id {
    char bytes[FSDPC_NCCL_ID_BYTES];
} fsdpc_nccl_id;

enum {
    FSDPC_NCCL_SUCCESS = 0,
    FSDPC_NCCL_UNHANDLED_CUDA_ERROR = 1,
    FSDPC_NCCL_SYSTEM_ERROR = 2,
    FSDPC_NCCL_INTERNAL_ERROR = 3,
    FSDPC_NCCL_INVALID_ARGUMENT = 4,
    FSDPC_NCCL_INVALID_USAGE = 5,
    FSDPC_NCCL_REMOTE_ERROR = 6,
    FSDPC_NCCL_IN_PROGRESS = 7
};
enum {
    FSDPC_NCCL_UINT8 = 1,
    FSDPC_NCCL_FLOAT16 = 6,
    FSDPC_NCCL_FLOAT32 = 7,
    FSDPC_NCCL_FLOAT64 = 8,
    FSDPC_NCCL_BFLOAT16 = 9
};
enum { FSDPC_NCCL_SUM = 0, FSDPC_NCCL_MAX = 2, FSDPC_NCCL_MIN = 3 };
enum {
    FSDPC_NCCL_OLDEST = 21800,
    FSDPC_NCCL_CONFIG_VERSION = 22803,
    FSDPC_NCCL_CONFIG_MAGIC = (int)0xcafebeef,
    FSDPC_NCCL_UNSET = INT_MIN,
    FSDPC_NCCL_NO_COLOR = -1,
    FSDPC_NCCL_WINDOW_SYMMETRIC = 1
};

typedef struct fsdpc_nccl_config {
    size_t bytes;
    unsigned magic, version;
    int blocking, cga_cluster, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
    int collnet, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer, nvlink_centric;
} fsdpc_nccl_config;

/* X(field, name in the library, required, result, parameters) */
#define FSDPC_NCCL_ENTRIES(X)                                                                 \
    X(get_version, "ncclGetVersion", true, fsdpc_nccl_result, (int *))                        \
    X(get_unique_id, "ncclGetUniqueId", true, fsdpc_nccl_result, (fsdpc_nccl_id *))           \
    X(init_rank, "ncclCommInitRankConfig", true, fsdpc_nccl_result,                           \
      (fsdpc_nccl_comm *, int, fsdpc_nccl_id, int, fsdpc_nccl_config *))                      \
    X(split, "ncclCommSplit", true, fsdpc_nccl_result,                                        \
      (fsdpc_nccl_comm, int, int, fsdpc_nccl_comm *, fsdpc_nccl_config *))                    \
    X(finalize, "ncclCommFinalize", true, fsdpc_nccl_result, (fsdpc_nccl_comm))               \
    X(destroy, "ncclCommDestroy", true, fsdpc_nccl_result, (fsdpc_nccl_comm))                 \
    X(abort, "ncclCommAbort", true, fsdpc_nccl_result, (fsdpc_nccl_comm))                     \
    X(async_error, "ncclCommGetAsyncError", true, fsdpc_nccl_result,                          \
      (fsdpc_nccl_comm, fsdpc_nccl_result *))                                                 \
    X(error_string, "ncclGetErrorString", true, const char *, (fsdpc_nccl_result))            \
    X(last_error, "ncclGetLastError", true, const char *, (fsdpc_nccl_comm))                  \
    X(all_gather, "ncclAllGather", true, fsdpc_nccl_result,                                   \
      (const void *, void *, size_t, fsdpc_nccl_type, fsdpc_nccl_comm, fsdpc_cu_stream))      \
    X(reduce_scatter, "ncclReduceScatter", true, fsdpc_nccl_result,                           \
      (const void *, void *, size_t, fsdpc_nccl_type, fsdpc_nccl_op, fsdpc_nccl_comm,         \
       fsdpc_cu_stream))                                                                      \
    X(all_reduce, "ncclAllReduce", true, fsdpc_nccl_result,                                   \
      (const void *, void *, size_t, fsdpc_nccl_type, fsdpc_nccl_op, fsdpc_nccl_comm,         \
       fsdpc_cu_stream))                                                                      \
    X(broadcast, "ncclBroadcast", true, fsdpc_nccl_result,                                    \
      (const void *, void *, size_t, fsdpc_nccl_type, int, fsdpc_nccl_comm, fsdpc_cu_stream)) \
    X(send, "ncclSend", true, fsdpc_nccl_result,                                              \
      (const void *, size_t, fsdpc_nccl_type, int, fsdpc_nccl_comm, fsdpc_cu_stream))         \
    X(receive, "ncclRecv", true, fsdpc_nccl_result,                                           \
      (void *, size_t, fsdpc_nccl_type, int, fsdpc_nccl_comm, fsdpc_cu_stream))               \
    X(group_start, "ncclGroupStart", true, fsdpc_nccl_result, (void))                         \
    X(group_end, "ncclGroupEnd", true, fsdpc_nccl_result, (void))                             \
    X(register_buffer, "ncclCommRegister", false, fsdpc_nccl_result,                          \
      (fsdpc_nccl_comm, void *, size_t, void **))                                             \
    X(deregister_buffer, "ncclCommDeregister", false, fsdpc_nccl_result,                      \
      (fsdpc_nccl_comm, void *))                                                              \
    X(window_register, "ncclCommWindowRegister", false, fsdpc_nccl_result,                    \
      (fsdpc_nccl_comm, void *, size_t, fsdpc_nccl_window *, int))                            \
    X(window_deregister, "ncclCommWindowDeregister", false, fsdpc_nccl_result,                \
      (fsdpc_nccl_comm, fsdpc_nccl_window))

typedef struct fsdpc_nccl {
#define FSDPC_NCCL_FIELD(field, name, required, result, params) result(*field) params;
    FSDPC_NCCL_ENTRIES(FSDPC_NCCL_FIELD)
#undef FSDPC_NCCL_FIELD
    int version;    /* 22803 is 2.28.3 */
    char path[256]; /* of the loaded library; "" if unknown */
} fsdpc_nccl;

/* Loads NCCL at the first call. Optional entries are NULL if the library lacks them. Fails with
 * FSDPC_E_UNAVAILABLE if there is no library, if it is older than 2.18, or if NCCL_COMM_BLOCKING
 * is set (not 0); the next call then tries again. Thread safe. *out has static storage. */
int fsdpc_nccl_get(const fsdpc_nccl **out);
/* Returns NCCL's element type for `dtype`; FSDPC_NCCL_UINT8 for FSDPC_BYTES. */
fsdpc_nccl_type fsdpc_nccl_type_of(fsdpc_dtype dtype);
/* Returns a configuration for non-blocking calls. All other settings are unset. */
fsdpc_nccl_config fsdpc_nccl_config_new(void);

#endif
