/* Private to the "shm" communicator: comm_shm.c (staged collectives, life) and comm_shm_direct.c
 * (buffers that all ranks see, and collectives on them without copies).
 *
 * A round is: write what the others need, meet, read what they wrote. Staging memory has two halves
 * used in turn; a rank that writes a half for round k + 2 has met the others in round k + 1, which
 * they entered after reading round k. So one barrier a round is enough.
 */
#ifndef FSDPC_COMM_SHM_IMPL_H
#define FSDPC_COMM_SHM_IMPL_H

#include <stdalign.h>

#include "comm/comm_impl.h"

enum {
    FSDPC_STAGE_BYTES = 512 * 1024, /* of one half: small enough to stay in a cache */
    FSDPC_TILE_NUMEL = 64 * 1024,   /* sums of 16-bit types go through F32 in tiles */
};

enum fsdpc_call_op {
    FSDPC_CALL_ALL_GATHER = 1,
    FSDPC_CALL_REDUCE_SCATTER,
    FSDPC_CALL_ALL_REDUCE,
    FSDPC_CALL_BROADCAST,
    FSDPC_CALL_BARRIER,
    FSDPC_CALL_BUFFER,
};

/* What a rank believes that it is calling: compared in every round, so that ranks which call
 * different things are told so instead of reading each other's bytes. */
typedef struct fsdpc_call {
    uint16_t op;
    uint16_t dtype;
    uint32_t detail; /* root, reduction, or whether a buffer is common */
    uint64_t count;  /* bytes or elements */
    uint64_t place;  /* 0: private memory; else which shared buffer, and where in it */
    int64_t verdict; /* not compared: a status that the others must know */
} fsdpc_call;

typedef struct fsdpc_call_line {
    alignas(128) fsdpc_call halves[2];
} fsdpc_call_line;

typedef struct fsdpc_comm_shm_group {
    fsdpc_comm base;
    fsdpc_shm *shm;
    fsdpc_comm_buffer *buffers;
    uint64_t buffers_made;
    uint32_t round;
    void *map;
    size_t map_bytes;
    fsdpc_call_line *calls; /* one line per rank */
    char *stage;            /* 2 halves per rank */
    float *tile;
} fsdpc_comm_shm_group;

static inline fsdpc_comm_shm_group *
fsdpc_comm_shm_of(fsdpc_comm *comm)
{
    return (fsdpc_comm_shm_group *)comm;
}

/* Publishes `call` with what this rank has written, waits for all, and checks that they call the
 * same. `verdicts` (optional): the first rank whose verdict is not FSDPC_OK, or -1. */
int fsdpc_comm_shm_meet(fsdpc_comm_shm_group *self, const fsdpc_call *call, const char *what,
                        int *verdicts);
/* dst[i] = reduction over all ranks' src[rank][i], in rank order. dst may be this rank's source. */
int fsdpc_comm_shm_combine(fsdpc_comm_shm_group *self, void *dst, const void *const *src,
                           fsdpc_dtype dtype, enum fsdpc_op op, int64_t n);

/* The shared buffer that holds [address, address + bytes) in this rank's part, or NULL. */
fsdpc_comm_buffer *fsdpc_comm_shm_find(const fsdpc_comm_shm_group *self, const void *address,
                                       size_t bytes);
int fsdpc_comm_shm_buffer_new(fsdpc_comm *comm, size_t bytes, bool common, fsdpc_comm_buffer **out);
/* The collectives on shared buffers; `address` lies in `buffer`. */
int fsdpc_comm_shm_direct_gather(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer,
                                 char *address, size_t piece_bytes, const char *what);
int fsdpc_comm_shm_direct_scatter(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer,
                                  char *address, int64_t piece_numel, fsdpc_dtype dtype,
                                  const char *what);
int fsdpc_comm_shm_direct_reduce(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer,
                                 char *address, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
                                 const char *what);
int fsdpc_comm_shm_direct_broadcast(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer,
                                    char *address, size_t bytes, int root, const char *what);

#endif
