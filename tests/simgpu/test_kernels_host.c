/* Every CUDA kernel, compiled for the host, against the plain C kernels: bit for bit.
 *
 * Where two NaNs met, or one was computed with, only that a NaN came out. Sums of squares are added
 * in another order and compared with a bound.
 */
#include "test.h"

#include <math.h>

#include "cuda_params.h"
#include "kernels.h"

#define DECLARE(kernel, params)                                                                   \
    void kernel##__host(const void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                        unsigned);
FSDPC_CUDA_KERNELS(DECLARE)

#define LAUNCH(kernel, params, blocks) \
    kernel##__host(params, (unsigned)(blocks), 1, 1, FSDPC_CUDA_THREADS, 1, 1, 0)

enum { GUARD = 64, SPAN = 16, BIG = 300007 };

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const double scales[] = {1.0, 1.0 / 3, -65536.0};
static const int64_t sizes[] = {0, 1, 3, 7, 8, 9, 31, 64, 257, 4099, BIG};
enum { SIZES = sizeof sizes / sizeof sizes[0], SCALES = sizeof scales / sizeof scales[0] };

static const fsdpc_kernels *plain;
static uint64_t random_state = 0x2545F4914F6CDD1Du;

static uint64_t
random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static int64_t
random_below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

/* A third each: ordinary numbers, patterns of any kind (NaNs, subnormals), corner cases. */
static void
fill(char *block, fsdpc_dtype type, int64_t n)
{
    static const double corners[] = {0.0,      -0.0,    INFINITY, -INFINITY, 65519.0, 65520.0,
                                     0x1p-133, 0x1p-24, 0x1p-25,  3.39e38,   -1e-42,  1.0};
    const size_t bytes = fsdpc_dtype_bytes(type);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = random_bits();
        double value = i % 3 ? ((double)(bits >> 11) * 0x1p-53 - 0.5) * 8 : corners[bits % 12];
        if (i % 5 == 0 || type == FSDPC_BYTES) {
            memcpy(block + (size_t)i * bytes, &bits, bytes);
        } else {
            plain->cast(block + (size_t)i * bytes, type, &value, FSDPC_F64, 1, 1.0);
        }
    }
}

static void
fill_ordinary(char *block, fsdpc_dtype type, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value = ((double)(random_bits() >> 11) * 0x1p-53 - 0.5) * 8;
        plain->cast(block + (size_t)i * fsdpc_dtype_bytes(type), type, &value, FSDPC_F64, 1, 1.0);
    }
}

static double
item_of(const char *block, fsdpc_dtype type, int64_t i)
{
    double value;
    plain->cast(&value, FSDPC_F64, block + (size_t)i * fsdpc_dtype_bytes(type), type, 1, 1.0);
    return value;
}

static bool
same(const char *got, const char *want, fsdpc_dtype type, int64_t n, bool any_nan)
{
    const size_t bytes = fsdpc_dtype_bytes(type);
    for (int64_t i = 0; i < n; i++) {
        const size_t at = (size_t)i * bytes;
        if (memcmp(got + at, want + at, bytes) == 0) {
            continue;
        }
        const double a = item_of(got, type, i), b = item_of(want, type, i);
        if (!any_nan || !isnan(a) || !isnan(b)) {
            fprintf(stderr, "element %lld of %lld: %a, not %a\n", (long long)i, (long long)n, a, b);
            return false;
        }
    }
    return true;
}

/* Source, result and wanted result, at the same place behind a 16-byte boundary. */
struct bed {
    size_t bytes;
    char *src, *got, *want;
};

static char *
new_block(size_t bytes)
{
    char *block = aligned_alloc(64, (bytes + 63) / 64 * 64);
    REQUIRE(block != NULL);
    memset(block, 0xA5, bytes);
    return block;
}

static struct bed
new_bed(int64_t n, size_t item)
{
    struct bed bed = {.bytes = (size_t)n * item + GUARD + SPAN};
    bed.src = new_block(bed.bytes);
    bed.got = new_block(bed.bytes);
    bed.want = new_block(bed.bytes);
    return bed;
}

static void
free_bed(struct bed *bed)
{
    free(bed->src);
    free(bed->got);
    free(bed->want);
}

static size_t
larger_item(fsdpc_dtype a, fsdpc_dtype b)
{
    const size_t x = fsdpc_dtype_bytes(a), y = fsdpc_dtype_bytes(b);
    return x > y ? x : y;
}

/* All before and behind the n items at `offset` is as it was. */
static bool
guarded(const struct bed *bed, size_t offset, size_t used)
{
    return memcmp(bed->got, bed->want, offset) == 0 &&
           memcmp(bed->got + offset + used, bed->want + offset + used,
                  bed->bytes - offset - used) == 0;
}

/* --- cast ----------------------------------------------------------------------------------- */

static void
cast_case(fsdpc_dtype dst, fsdpc_dtype src, int64_t n, int64_t dst_skip, int64_t src_skip,
          double scale, int blocks)
{
    struct bed bed = new_bed(n, larger_item(dst, src));
    const size_t to = (size_t)dst_skip * fsdpc_dtype_bytes(dst);
    char *from = bed.src + (size_t)src_skip * fsdpc_dtype_bytes(src);
    fill(from, src, n);
    fsdpc_cuda_cast_params p = {
        .dst = bed.got + to, .src = from, .n = n, .scale = scale, .dst_type = dst, .src_type = src};
    LAUNCH(fsdpc_cuda_cast, &p, blocks);
    plain->cast(bed.want + to, dst, from, src, n, scale);
    CHECK(same(bed.got + to, bed.want + to, dst, n, scale != 1.0));
    CHECK(guarded(&bed, to, (size_t)n * fsdpc_dtype_bytes(dst)));
    free_bed(&bed);
}

static void
casts_are_the_plain_ones(void)
{
    for (int d = 0; d < 4; d++) {
        for (int s = 0; s < 4; s++) {
            for (int i = 0; i < SIZES; i++) {
                for (int c = 0; c < SCALES; c++) {
                    cast_case(floats[d], floats[s], sizes[i], i % 4 % 2, 0, scales[c], 1 + i % 3);
                    cast_case(floats[d], floats[s], sizes[i], i % 2, (i + c) % 2, scales[c], 2);
                }
            }
        }
    }
}

static void
copies_take_any_address(void)
{
    for (int64_t to = 0; to < SPAN; to++) {
        for (int64_t from = 0; from < SPAN; from++) {
            cast_case(FSDPC_BYTES, FSDPC_BYTES, random_below(70), to, from, 1.0, 1);
            cast_case(FSDPC_BYTES, FSDPC_BYTES, 5000 + random_below(16), to, from, 1.0, 2);
        }
    }
    cast_case(FSDPC_BYTES, FSDPC_BYTES, BIG, 3, 3, 1.0, 4);
}

static void
a_buffer_is_scaled_in_place_by_a_factor_in_memory(void)
{
    for (int t = 0; t < 4; t++) {
        struct bed bed = new_bed(5003, fsdpc_dtype_bytes(floats[t]));
        double factor = 0.37;
        fill(bed.want, floats[t], 5003);
        memcpy(bed.got, bed.want, bed.bytes);
        /* Two spans of odd lengths, of two blocks and of one. */
        fsdpc_cuda_scale_params p = {
            .factor = &factor,
            .count = 2,
            .span = {{bed.got, 4001, 0, floats[t]},
                     {bed.got + 4001 * fsdpc_dtype_bytes(floats[t]), 1002, 2, floats[t]}}};
        LAUNCH(fsdpc_cuda_scale, &p, 3);
        plain->scale(bed.want, floats[t], 5003, factor);
        CHECK(same(bed.got, bed.want, floats[t], 5003, true));
        CHECK(guarded(&bed, 0, 5003 * fsdpc_dtype_bytes(floats[t])));
        factor = 1.0;
        memcpy(bed.got, bed.src, bed.bytes);
        LAUNCH(fsdpc_cuda_scale, &p, 3);
        CHECK(memcmp(bed.got, bed.src, bed.bytes) == 0);
        free_bed(&bed);
    }
}

/* --- pack ----------------------------------------------------------------------------------- */

enum { ENTRIES = 40, MOST_DIMS = 5 };

/* One source of a random unit, and the entry that it goes to. */
struct piece {
    char *block;
    fsdpc_dtype type;
    bool missing, strided;
    int ndim;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
    fsdpc_cuda_view view;
};

struct pack {
    struct piece pieces[ENTRIES];
    fsdpc_cuda_pack_entry entries[ENTRIES];
    fsdpc_cuda_source sources[ENTRIES];
    int32_t *tile_entry;
    int64_t tiles;
    int entry_count;
    size_t bytes;
};

static int64_t
numel(const struct piece *piece)
{
    int64_t n = 1;
    for (int d = 0; d < piece->ndim; d++) {
        n *= piece->shape[d];
    }
    return n;
}

/* A permuted, stepped view of its own memory; a stride of 0 now and then. */
static void
make_strided(struct piece *piece)
{
    int64_t reach = 1;
    piece->ndim = 1 + (int)random_below(MOST_DIMS);
    for (int d = 0; d < piece->ndim; d++) {
        piece->shape[d] = 1 + random_below(piece->ndim > 3 ? 7 : 40);
        piece->strides[d] = random_below(9) == 0 ? 0 : reach * (1 + random_below(2));
        reach += piece->strides[d] * (piece->shape[d] - 1);
    }
    piece->block = new_block((size_t)reach * fsdpc_dtype_bytes(piece->type));
    fill(piece->block, piece->type, reach);
    piece->view.data = piece->block;
    piece->view.ndim = piece->ndim;
    memcpy(piece->view.shape, piece->shape, sizeof piece->shape);
    memcpy(piece->view.strides, piece->strides, sizeof piece->strides);
}

static void
make_flat(struct piece *piece)
{
    piece->ndim = 1;
    piece->shape[0] = random_below(3) ? random_below(600) : random_below(30000);
    piece->strides[0] = 1;
    piece->block = new_block((size_t)(piece->shape[0] + 1) * fsdpc_dtype_bytes(piece->type));
    fill(piece->block, piece->type, piece->shape[0] + 1);
    /* Half of them begin where no vector can be loaded. */
    piece->view.data = piece->block + (size_t)random_below(2) * fsdpc_dtype_bytes(piece->type);
}

static fsdpc_cuda_source
source_word(struct piece *piece)
{
    const void *address = piece->strided ? (const void *)&piece->view : piece->view.data;
    return piece->missing ? 0
                          : (uint64_t)(uintptr_t)address |
                                (uint64_t)piece->type << FSDPC_CUDA_SOURCE_TYPE_SHIFT |
                                (piece->strided ? FSDPC_CUDA_SOURCE_STRIDED : 0);
}

static void
add_entry(struct pack *pack, int64_t n, fsdpc_dtype type, int source)
{
    const int64_t item = (int64_t)fsdpc_dtype_bytes(type);
    const int64_t tile = FSDPC_CUDA_TILE_BYTES / item;
    const int64_t tiles = (n + tile - 1) / tile;
    pack->entries[pack->entry_count] = (fsdpc_cuda_pack_entry){.first_tile = pack->tiles,
                                                               .n = n,
                                                               .dst_offset = (int64_t)pack->bytes,
                                                               .dst_type = type,
                                                               .source = source};
    pack->tile_entry =
        realloc(pack->tile_entry, (size_t)(pack->tiles + tiles + 1) * sizeof *pack->tile_entry);
    REQUIRE(pack->tile_entry != NULL);
    for (int64_t t = 0; t < tiles; t++) {
        pack->tile_entry[pack->tiles++] = pack->entry_count;
    }
    pack->entry_count++;
    pack->bytes += (size_t)(n * item);
}

static void
make_pack(struct pack *pack, fsdpc_dtype dst)
{
    memset(pack, 0, sizeof *pack);
    for (int i = 0; i < ENTRIES / 2; i++) {
        struct piece *piece = &pack->pieces[i];
        piece->type = floats[random_below(4)];
        piece->missing = random_below(5) == 0;
        piece->strided = random_below(3) == 0;
        if (piece->strided) {
            make_strided(piece);
        } else {
            make_flat(piece);
        }
        add_entry(pack, numel(piece), dst, i);
        const int64_t gap = random_below(4) ? (int64_t)(-pack->bytes & 15) : 20000;
        add_entry(pack, gap / (int64_t)fsdpc_dtype_bytes(dst), dst, -1);
        pack->sources[i] = source_word(piece);
    }
}

static void
want_packed(const struct pack *pack, char *want, double scale)
{
    for (int e = 0; e < pack->entry_count; e++) {
        const fsdpc_cuda_pack_entry *entry = &pack->entries[e];
        char *dst = want + entry->dst_offset;
        const struct piece *piece = &pack->pieces[entry->source < 0 ? 0 : entry->source];
        const fsdpc_dtype type = (fsdpc_dtype)entry->dst_type;
        if (entry->source < 0 || piece->missing) {
            memset(dst, 0, (size_t)entry->n * fsdpc_dtype_bytes(type));
        } else {
            REQUIRE_OK(fsdpc_kernel_pack_strided(plain, dst, type, piece->view.data, piece->type,
                                                 piece->ndim, piece->shape, piece->strides, scale));
        }
    }
}

static void
free_pack(struct pack *pack)
{
    for (int i = 0; i < ENTRIES; i++) {
        free(pack->pieces[i].block);
    }
    free(pack->tile_entry);
}

static void
check_packed(const struct pack *pack, const struct bed *bed, double scale)
{
    want_packed(pack, bed->want, scale);
    for (int e = 0; e < pack->entry_count; e++) {
        const fsdpc_cuda_pack_entry *entry = &pack->entries[e];
        CHECK(same(bed->got + entry->dst_offset, bed->want + entry->dst_offset,
                   (fsdpc_dtype)entry->dst_type, entry->n, scale != 1.0));
    }
    CHECK(guarded(bed, 0, pack->bytes));
}

static void
a_unit_is_packed_in_one_launch(void)
{
    for (int round = 0; round < 24; round++) {
        struct pack pack;
        const double scale = scales[round % SCALES];
        make_pack(&pack, floats[round % 4]);
        struct bed bed = new_bed((int64_t)pack.bytes, 1);
        fsdpc_cuda_pack_params p = {.dst = bed.got,
                                    .entries = pack.entries,
                                    .tile_entry = pack.tile_entry,
                                    .tiles = pack.tiles,
                                    .scale = scale};
        if (round % 2) {
            p.table = pack.sources;
            memset(p.source, 0xFF, sizeof p.source);
        } else {
            memcpy(p.source, pack.sources, sizeof pack.sources);
        }
        LAUNCH(fsdpc_cuda_pack, &p, pack.tiles);
        check_packed(&pack, &bed, scale);
        free_bed(&bed);
        free_pack(&pack);
    }
}

/* --- reduce and norms ------------------------------------------------------------------------- */

static void
check_norm(const fsdpc_cuda_norm_value *got, const fsdpc_norm *want)
{
    CHECK(isnan(want->sum)
              ? isnan(got->sum)
              : got->sum == want->sum || fabs(got->sum - want->sum) <= 1e-12 * fabs(want->sum));
    CHECK(isnan(want->max) ? isnan(got->max) : got->max == want->max);
    CHECK_INT(got->nonfinite != 0, want->nonfinite);
}

static fsdpc_cuda_norm_value
summed(const fsdpc_cuda_norm_value *partials, int64_t count)
{
    fsdpc_cuda_norm_value total = {.sum = 5, .max = 0.5};
    fsdpc_cuda_norm_sum_params p = {.partials = partials, .out = &total, .count = count};
    LAUNCH(fsdpc_cuda_norm_sum, &p, 1);
    return total;
}

static void
reduce_case(fsdpc_dtype acc, fsdpc_dtype src, int64_t n, int count, bool add, bool ordinary)
{
    struct bed bed = new_bed(n, fsdpc_dtype_bytes(acc));
    const size_t skip = (size_t)(n % 3) * fsdpc_dtype_bytes(acc);
    const double scale = scales[n % SCALES];
    const int64_t blocks = fsdpc_cuda_norm_blocks(n);
    const void *list[FSDPC_CUDA_REDUCE_SOURCES] = {0};
    char *blocks_of[8];
    fsdpc_cuda_reduce_params p = {.acc = bed.got + skip,
                                  .n = n,
                                  .scale = scale,
                                  .acc_type = acc,
                                  .src_type = src,
                                  .src_count = count,
                                  .add = add};
    (ordinary ? fill_ordinary : fill)(bed.want + skip, acc, n);
    memcpy(bed.got, bed.want, bed.bytes);
    for (int s = 0; s < count; s++) {
        /* One source in a case lies where the others' vectors do not. */
        blocks_of[s] = new_block((size_t)(n + 1) * fsdpc_dtype_bytes(src) + SPAN);
        (ordinary ? fill_ordinary : fill)(blocks_of[s], src, n + 1);
        list[s] =
            s == 1 && count > 3 ? NULL : blocks_of[s] + (size_t)(n % 3) * fsdpc_dtype_bytes(src);
    }
    memcpy(p.src, list, sizeof list);
    LAUNCH(fsdpc_cuda_reduce, &p, blocks);
    plain->reduce(bed.want + skip, acc, list, count, src, n, scale, add);
    CHECK(same(bed.got + skip, bed.want + skip, acc, n, true));
    CHECK(guarded(&bed, skip, (size_t)n * fsdpc_dtype_bytes(acc)));
    for (int s = 0; s < count; s++) {
        free(blocks_of[s]);
    }
    free_bed(&bed);
}

static void
sums_are_the_plain_ones(void)
{
    static const int64_t some[] = {0, 1, 6, 33, 4100, 9999, BIG};
    for (int a = 0; a < 2; a++) {
        for (int s = 0; s < 4; s++) {
            for (int i = 0; i < 7; i++) {
                for (int count = 0; count < 6; count++) {
                    if (some[i] < BIG || count == 1 || count == 3) {
                        reduce_case(a ? FSDPC_F64 : FSDPC_F32, floats[s], some[i], count, i & 1,
                                    false);
                        reduce_case(a ? FSDPC_F64 : FSDPC_F32, floats[s], some[i], count, true,
                                    true);
                    }
                }
            }
        }
    }
}

static void
norm_case(fsdpc_dtype type, int64_t n, int64_t skip, bool ordinary)
{
    static fsdpc_cuda_norm_value partials[FSDPC_CUDA_NORM_BLOCKS];
    struct bed bed = new_bed(n + 8, fsdpc_dtype_bytes(type));
    const char *src = bed.src + (size_t)skip * fsdpc_dtype_bytes(type);
    (ordinary ? fill_ordinary : fill)(bed.src, type, n + skip);
    const int64_t blocks = fsdpc_cuda_norm_blocks(n);
    fsdpc_cuda_norm_params p = {
        .p = 2, .partials = partials, .count = 1, .span = {{(void *)(uintptr_t)src, n, 0, type}}};
    LAUNCH(fsdpc_cuda_norm, &p, blocks);
    fsdpc_norm want = plain->norm2(src, type, n);
    fsdpc_cuda_norm_value got = summed(partials, blocks);
    check_norm(&got, &want);
    const fsdpc_cuda_norm_value first = got;
    LAUNCH(fsdpc_cuda_norm, &p, blocks);
    got = summed(partials, blocks);
    CHECK(memcmp(&got, &first, sizeof got) == 0);
    if (ordinary) {
        p.p = 3;
        LAUNCH(fsdpc_cuda_norm, &p, blocks);
        want = (fsdpc_norm){.sum = fsdpc_kernel_norm_p(src, type, n, 3)};
        got = summed(partials, blocks);
        check_norm(&got, &want);
    }
    free_bed(&bed);
}

/* A launch of several arrays leaves what launches of one leave. */
static void
norms_of_a_list_are_those_of_its_spans(double order)
{
    static const int64_t counts[] = {1, 5003, 9000, 4096, 3, 40000, 4097};
    enum { COUNTS = sizeof counts / sizeof *counts, ROOM = 64 };
    static fsdpc_cuda_norm_value apart[ROOM], together[ROOM];
    struct bed beds[COUNTS];
    fsdpc_cuda_norm_params list = {.partials = together, .p = order, .count = COUNTS};
    int64_t blocks = 0;
    for (int i = 0; i < COUNTS; i++) {
        const fsdpc_dtype type = floats[i % 4];
        beds[i] = new_bed(counts[i], fsdpc_dtype_bytes(type));
        fill_ordinary(beds[i].src, type, counts[i]);
        const fsdpc_cuda_span span = {beds[i].src, counts[i], 0, type};
        fsdpc_cuda_norm_params one = {
            .partials = apart + blocks, .p = order, .count = 1, .span = {span}};
        LAUNCH(fsdpc_cuda_norm, &one, fsdpc_cuda_norm_blocks(counts[i]));
        list.span[i] = span;
        list.span[i].first_block = (int32_t)blocks;
        blocks += fsdpc_cuda_norm_blocks(counts[i]);
    }
    REQUIRE(blocks <= ROOM);
    LAUNCH(fsdpc_cuda_norm, &list, blocks);
    CHECK(memcmp(apart, together, (size_t)blocks * sizeof *apart) == 0);
    for (int i = 0; i < COUNTS; i++) {
        free_bed(&beds[i]);
    }
}

static void
norms_are_the_plain_ones(void)
{
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < SIZES; i++) {
            norm_case(floats[t], sizes[i], i % 4, true);
            norm_case(floats[t], sizes[i], (i + 1) % 4, false);
        }
    }
    norm_case(FSDPC_F32, (int64_t)FSDPC_CUDA_NORM_BLOCKS * FSDPC_CUDA_NORM_BLOCK_ITEMS / 2 + 77, 0,
              true);
}

/* As many as a large model's units leave together; whole numbers, so that any order has one sum. */
static void
many_parts_are_summed_each_once(void)
{
    static const int64_t counts[] = {0, 1, 255, 1536, 1537, 5003};
    static fsdpc_cuda_norm_value parts[5003];
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        double want = 0;
        for (int64_t i = 0; i < counts[c]; i++) {
            parts[i] = (fsdpc_cuda_norm_value){.sum = (double)(i + 1), .max = (double)i};
            want += parts[i].sum;
        }
        fsdpc_cuda_norm_value total = summed(parts, counts[c]);
        CHECK(total.sum == want && !total.nonfinite);
        CHECK(total.max == (counts[c] ? (double)(counts[c] - 1) : 0));
        if (counts[c]) {
            parts[counts[c] - 1].nonfinite = 1;
            total = summed(parts, counts[c]);
            CHECK(total.nonfinite == 1);
        }
    }
}

static void
norms_of_units_add_up_to_a_factor(void)
{
    fsdpc_cuda_norm_value total = {.sum = 9, .max = 2};
    const fsdpc_cuda_norm_value part = {.sum = 16, .max = 3};
    double norm, factor;
    fsdpc_cuda_norm_sum_params add = {.partials = &part, .out = &total, .count = 1, .add = 1};
    LAUNCH(fsdpc_cuda_norm_sum, &add, 1);
    CHECK(total.sum == 25 && total.max == 3 && !total.nonfinite);
    fsdpc_cuda_clip_params p = {.total = &total, .norm = &norm, .factor = &factor};
    p.p = 2, p.max_norm = 1, p.epsilon = 1e-6;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 5 && factor == 1 / (5 + 1e-6));
    p.max_norm = 50;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 5 && factor == 1);
    p.p = INFINITY, p.max_norm = 1.5;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 3 && factor == 1.5 / (3 + 1e-6));
    total.sum = 27, p.p = 3;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(fabs(norm - 3) < 1e-14);
    total.sum = NAN, p.p = 2;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(isnan(norm) && isnan(factor));
    total.sum = INFINITY;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(isinf(norm) && factor == 0);
}

/* Half of the elements are what the sum shows, the others anything; a NaN that was not touched keeps
 * its digits, too. */
static void
refresh_case(fsdpc_dtype acc, fsdpc_dtype seen, int64_t n, int64_t acc_skip, int64_t seen_skip,
             int blocks)
{
    struct bed bed = new_bed(n, larger_item(acc, seen));
    const size_t wide = fsdpc_dtype_bytes(acc), narrow = fsdpc_dtype_bytes(seen);
    const size_t to = (size_t)acc_skip * wide;
    char *shown = bed.src + (size_t)seen_skip * narrow;
    char *changed = new_block((size_t)n * narrow + 1);
    fill(bed.want + to, acc, n);
    memcpy(bed.got, bed.want, bed.bytes);
    plain->cast(shown, seen, bed.want + to, acc, n, 1.0);
    fill(changed, seen, n);
    for (int64_t i = 0; i < n; i++) {
        if (random_below(2)) {
            memcpy(shown + (size_t)i * narrow, changed + (size_t)i * narrow, narrow);
        }
    }
    fsdpc_cuda_refresh_params p = {
        .acc = bed.got + to, .grad = shown, .n = n, .acc_type = acc, .grad_type = seen};
    LAUNCH(fsdpc_cuda_refresh, &p, blocks);
    fsdpc_kernel_refresh(plain, bed.want + to, acc, shown, seen, n);
    CHECK(same(bed.got + to, bed.want + to, acc, n, false));
    CHECK(guarded(&bed, to, (size_t)n * wide));
    free(changed);
    free_bed(&bed);
}

static void
sums_are_refreshed_as_by_the_plain_kernel(void)
{
    for (int wide = 0; wide < 2; wide++) {
        for (int s = 0; s < 4; s++) {
            const fsdpc_dtype acc = wide ? FSDPC_F64 : FSDPC_F32;
            for (int i = 0; i < SIZES; i++) {
                refresh_case(acc, floats[s], sizes[i], 0, 0, 1 + i % 3);
                refresh_case(acc, floats[s], sizes[i], i % 2, i % 2, 2);
                refresh_case(acc, floats[s], sizes[i], (i + 1) % 2, i % 2, 2);
            }
        }
    }
}

int
main(void)
{
    plain = fsdpc_kernels_plain();
    casts_are_the_plain_ones();
    copies_take_any_address();
    a_buffer_is_scaled_in_place_by_a_factor_in_memory();
    a_unit_is_packed_in_one_launch();
    sums_are_the_plain_ones();
    sums_are_refreshed_as_by_the_plain_kernel();
    norms_are_the_plain_ones();
    norms_of_a_list_are_those_of_its_spans(2);
    norms_of_a_list_are_those_of_its_spans(3);
    many_parts_are_summed_each_once();
    norms_of_units_add_up_to_a_factor();
    return test_result();
}
