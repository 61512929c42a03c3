/* Adam with 8-bit states: one code per element, one scale per block of 256 elements.
 *
 * The codes are those of dynamic quantisation (Dettmers, arXiv 1511.04561 and 2110.02861): each decade
 * of [1e-7, 1] is cut into equal cells, twice as many as in the decade below; a code stands for the
 * middle of its cell. m has a sign and 1 to 64 cells per decade; v has no sign and 2 to 128. Two choices
 * differ from bitsandbytes:
 * - The scale of m is the element of the largest magnitude with its sign, so that this element is
 *   exactly 1 and quantising dequantised values gives the same codes. A state dict can therefore
 *   hold float32 values, and loading them on any number of ranks restores the codes to the bit.
 * - A positive v never gets the code of zero, because its element would then move by lr * m / eps.
 * A block with a value that is not finite gets the scale NaN, so its elements become NaN in the next step.
 *
 * A block that several ranks share has one scale, from the largest of all ranks' elements. So such a block's
 * step has two halves: fsdpc_optim_edges8 computes the new states of the first and the last block and reports
 * their extremes; the caller exchanges the extremes; fsdpc_optim_step8 computes the states again.
 */
#include "optim/optim_impl.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "base/status.h"

enum { BLOCK = FSDPC_OPTIM_BLOCK, EDGE = FSDPC_OPTIM_EDGE };

/* --- the map ----------------------------------------------------------------------------------- */

static fsdpc_optim_codes map[2]; /* [0] is the map for m, [1] the map for v */

/* Cells of decade d are numbered from `cells` = 2^d (without sign: 2^(d+1)) on, so the exponent of a cell's
 * number gives its decade. The limit between two decades is halfway between the values of two codes. */
static void
make_decade(fsdpc_optim_codes *out, int decade, const double *limits)
{
    const double size = pow(10, decade - 6), cells = (out->has_sign ? 1 : 2) << decade;
    const int exponent = decade + (out->has_sign ? 127 : 128);
    for (int lane = 0; lane < 16; lane += 8) {
        const int d = lane + decade, by_exponent = lane + exponent % 8;
        out->two[d] = decade + 2 < 7 ? (float)limits[decade + 2] : INFINITY;
        out->next[d] = decade + 1 < 7 ? (float)limits[decade + 1] : INFINITY;
        out->by[d] = (float)(cells / 0.9 / size);
        out->offset[d] = (float)(cells - cells / 9);
        out->low[d] = (float)cells;
        out->high[d] = (float)(2 * cells - 1);
        out->base[by_exponent] = (float)((0.1 + 0.45 / cells) * size);
        out->slope[by_exponent] = (float)(0.9 / cells * size);
    }
}

static void
make_map(void)
{
    for (int which = 0; which < 2; which++) {
        double limits[7] = {0};
        map[which].has_sign = which == 0;
        for (int decade = 1; decade < 7; decade++) {
            const double cells = (which == 0 ? 1 : 2) << decade;
            limits[decade] = (0.1 + 0.18 / cells) * pow(10, decade - 6);
        }
        for (int decade = 0; decade < 7; decade++) {
            make_decade(&map[which], decade, limits);
        }
        map[which].middle = (float)limits[4];
        map[which].zero = which == 0 ? 2.75e-7f : 0;
        map[which].one = which == 0 ? 0.996484375f : 0.9982421875f;
        /* The cell after the last one stands for the value 1. */
        const int last = (which == 0 ? 134 : 135) % 8;
        map[which].base[last] = map[which].base[last + 8] = 1;
    }
}

static const fsdpc_optim_codes *
map_of(int which)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_map);
    return &map[which];
}

void
fsdpc_optim_map_of(int which, fsdpc_step_codes *out)
{
    const fsdpc_optim_codes *from = map_of(which);
    const size_t bytes = sizeof out->two;
    memcpy(out->two, from->two, bytes);
    memcpy(out->next, from->next, bytes);
    memcpy(out->by, from->by, bytes);
    memcpy(out->offset, from->offset, bytes);
    memcpy(out->low, from->low, bytes);
    memcpy(out->high, from->high, bytes);
    memcpy(out->base, from->base, bytes);
    memcpy(out->slope, from->slope, bytes);
    out->zero = from->zero;
    out->one = from->one;
    out->middle = from->middle;
}

/* --- blocks ------------------------------------------------------------------------------------ */

/* Returns the number of elements from `index` to the end of its block, at most `left`. */
static int64_t
block_length(int64_t index, int64_t left)
{
    const int64_t rest = BLOCK - index % BLOCK;
    return rest < left ? rest : left;
}

/* Writes the extremes of one block's values to their places in `edge` (m: entries 0 and 1, v: entry 2). */
static void
find_extremes(const fsdpc_optim_loops *loops, int which, const float *values, int64_t n,
              float *edge)
{
    float ignored;
    if (which == 0) {
        loops->extremes(values, n, &edge[0], &edge[1]);
    } else {
        loops->extremes(values, n, &edge[2], &ignored);
    }
}

/* Returns the scale of a block from its extremes `edge`, or from `values` if `edge` is NULL or negative. */
static float
scale_of(const fsdpc_optim_loops *loops, int which, const float *values, int64_t n,
         const float *edge)
{
    float own[EDGE];
    const float *known = edge;
    if (edge == NULL || edge[which == 0 ? 0 : 2] < 0) {
        find_extremes(loops, which, values, n, own);
        known = own;
    }
    if (which == 1) {
        return isinf(known[2]) ? NAN : known[2];
    }
    if (isinf(known[0]) || isinf(known[1])) {
        return NAN;
    }
    return known[0] >= known[1] ? known[0] : -known[1];
}

static void
quantise_block(const fsdpc_optim_loops *loops, int which, const float *values, int64_t n,
               const float *edge, uint8_t *codes, float *scale)
{
    *scale = scale_of(loops, which, values, n, edge);
    if (*scale == 0 || isnan(*scale)) {
        memset(codes, which == 0 ? 127 : 0, (size_t)n);
    } else {
        loops->quantise(map_of(which), codes, values, n, *scale);
    }
}

/* Returns the entry of `edges` for element `index`'s block, or NULL if that is neither first nor last. */
static const float *
edge_of(const float *edges, int64_t first, int64_t numel, int64_t index)
{
    const int64_t block = index / BLOCK;
    if (edges == NULL) {
        return NULL;
    }
    if (block == first / BLOCK) {
        return edges;
    }
    return block == (first + numel - 1) / BLOCK ? edges + EDGE : NULL;
}

/* --- values as a whole ------------------------------------------------------------------------- */

static const fsdpc_optim_loops *
chosen(void)
{
    const fsdpc_optim_loops *loops;
    return fsdpc_optim_select(&loops) == FSDPC_OK ? loops : fsdpc_optim_loops_plain();
}

void
fsdpc_optim_quantise(int which, const float *values, int64_t first, int64_t n, const float *edges,
                     uint8_t *codes, float *scales)
{
    const fsdpc_optim_loops *loops = chosen();
    for (int64_t done = 0, count; done < n; done += count) {
        const int64_t index = first + done;
        count = block_length(index, n - done);
        quantise_block(loops, which, values + done, count, edge_of(edges, first, n, index),
                       codes + done, &scales[index / BLOCK - first / BLOCK]);
    }
}

void
fsdpc_optim_dequantise(int which, const uint8_t *codes, const float *scales, int64_t first,
                       int64_t n, float *values)
{
    const fsdpc_optim_loops *loops = chosen();
    for (int64_t done = 0, count; done < n; done += count) {
        const int64_t index = first + done;
        count = block_length(index, n - done);
        loops->dequantise(map_of(which), values + done, codes + done, count,
                          scales[index / BLOCK - first / BLOCK]);
    }
}

void
fsdpc_optim_edges_of(int which, const float *values, int64_t first, int64_t n, float *edges)
{
    const fsdpc_optim_loops *loops = chosen();
    const int64_t last = (first + n - 1) / BLOCK * BLOCK;
    const int64_t begin = last > first ? last - first : 0;
    find_extremes(loops, which, values, block_length(first, n), edges);
    find_extremes(loops, which, values + begin, n - begin, edges + EDGE);
}

/* --- a step ------------------------------------------------------------------------------------ */

struct pass {
    const fsdpc_optim_loops *loops;
    const fsdpc_optim_rule *rule;
    const fsdpc_optim_tensor *tensors;
    fsdpc_optim_meter meter;
};

struct block {
    float p[BLOCK], m[BLOCK], v[BLOCK];
};

static fsdpc_optim_numbers
numbers_of(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor)
{
    fsdpc_optim_numbers k = fsdpc_optim_numbers_of(rule, tensor);
    fsdpc_optim_make_quick(&k);
    return k;
}

/* Computes the new values of one block in buffers, and returns the address of the parameter's values. */
static float *
compute_block(const struct pass *pass, const fsdpc_optim_tensor *tensor,
              const fsdpc_optim_numbers *k, int64_t begin, int64_t n, bool write,
              struct block *block)
{
    float grad_buffer[FSDPC_OPTIM_TILE];
    const fsdpc_optim_loops *loops = pass->loops;
    const int64_t scale = (tensor->first + begin) / BLOCK - tensor->first / BLOCK;
    float *p = fsdpc_optim_load(loops, tensor->param, tensor->param_type, begin, n, block->p);
    if (!write && p != block->p) {
        p = memcpy(block->p, p, (size_t)n * sizeof *p);
    }
    const void *g =
        fsdpc_optim_gradient(loops, pass->rule, tensor, begin, n, p, write, grad_buffer);
    loops->dequantise(map_of(0), block->m, (const uint8_t *)tensor->states[0] + begin, n,
                      tensor->scales[0][scale]);
    loops->dequantise(map_of(1), block->v, (const uint8_t *)tensor->states[1] + begin, n,
                      tensor->scales[1][scale]);
    loops->adam_quick(k, n, p, g, block->m, block->v);
    return p;
}

static void
step_block(const struct pass *pass, const fsdpc_optim_tensor *tensor, const fsdpc_optim_numbers *k,
           int64_t begin, int64_t n)
{
    const int64_t place = tensor->first + begin, scale = place / BLOCK - tensor->first / BLOCK;
    const float *edge = edge_of(tensor->edges, tensor->first, tensor->numel, place);
    struct block block;
    float *p = compute_block(pass, tensor, k, begin, n, true, &block);
    fsdpc_optim_store(pass->loops, tensor->param, tensor->param_type, begin, n, p);
    fsdpc_optim_average_tile(pass->loops, pass->rule, tensor, begin, n);
    quantise_block(pass->loops, 0, block.m, n, edge, (uint8_t *)tensor->states[0] + begin,
                   &tensor->scales[0][scale]);
    quantise_block(pass->loops, 1, block.v, n, edge, (uint8_t *)tensor->states[1] + begin,
                   &tensor->scales[1][scale]);
}

static void
step_part(void *context, int index, int64_t begin, int64_t end)
{
    _Alignas(64) double old[FSDPC_OPTIM_MEASURED_TILE];
    const struct pass *pass = context;
    const fsdpc_optim_tensor *tensor = &pass->tensors[index];
    const fsdpc_optim_numbers k = numbers_of(pass->rule, tensor);
    const bool measured = pass->meter.values != NULL && tensor->measures != NULL;
    for (int64_t done = begin, count; done < end; done += count) {
        count = block_length(tensor->first + done, end - done);
        if (measured) {
            fsdpc_optim_before_tile(&pass->meter, tensor, index, done, count, old);
        }
        step_block(pass, tensor, &k, done, count);
        if (measured) {
            fsdpc_optim_behind_tile(&pass->meter, tensor, index, done, count, old);
        }
    }
}

int
fsdpc_optim_check8(const fsdpc_optim_tensor *tensor, int position)
{
    if (tensor->param_type == FSDPC_F64 || tensor->grad_type == FSDPC_F64 ||
        !fsdpc_dtype_is_float(tensor->param_type) || !fsdpc_dtype_is_float(tensor->grad_type)) {
        return fsdpc_error(FSDPC_E_TYPE,
                           "tensor %d of the step: states of 8 bits need float32, bfloat16 or "
                           "float16 parameters and gradients",
                           position);
    }
    return FSDPC_OK;
}

static int
check(const fsdpc_optim_tensor *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(fsdpc_optim_check8(&tensors[i], i));
    }
    return FSDPC_OK;
}

int
fsdpc_optim_step8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                  int threads)
{
    struct pass pass = {.rule = rule, .tensors = tensors};
    FSDPC_TRY(check(tensors, count));
    FSDPC_TRY(fsdpc_optim_select(&pass.loops));
    FSDPC_TRY(fsdpc_optim_meter_open(&pass.meter, tensors, count));
    const int status = fsdpc_optim_for_parts(tensors, count, threads, step_part, &pass);
    fsdpc_optim_meter_close(&pass.meter, tensors, count);
    return status;
}

int
fsdpc_optim_edges8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count)
{
    struct pass pass = {.rule = rule, .tensors = tensors};
    struct block block;
    FSDPC_TRY(check(tensors, count));
    FSDPC_TRY(fsdpc_optim_select(&pass.loops));
    for (int i = 0; i < count; i++) {
        const fsdpc_optim_tensor *tensor = &tensors[i];
        const fsdpc_optim_numbers k = numbers_of(rule, tensor);
        const int64_t end = tensor->first + tensor->numel;
        if (tensor->numel == 0) {
            continue;
        }
        const int64_t last = (end - 1) / BLOCK * BLOCK;
        const int64_t begins[2] = {0, last > tensor->first ? last - tensor->first : 0};
        for (int e = 0; e < 2; e++) {
            const int64_t n = block_length(tensor->first + begins[e], tensor->numel - begins[e]);
            compute_block(&pass, tensor, &k, begins[e], n, false, &block);
            find_extremes(pass.loops, 0, block.m, n, tensor->edges + e * EDGE);
            find_extremes(pass.loops, 1, block.v, n, tensor->edges + e * EDGE);
        }
    }
    return FSDPC_OK;
}
