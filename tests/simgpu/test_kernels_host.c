/* Every CUDA kernel, compiled for the host, against the plain C kernels: bit for bit.
 *
 * Where two NaNs met, or one was computed with, only that a NaN came out. Sums of squares are added
 * in another order and compared with a bound.
 */
#include "cuda_params.h"
#include "kernel_cases.h"

#define DECLARE(kernel, params)                                                                   \
    void kernel##__host(const void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                        unsigned);
FSDPC_CUDA_KERNELS(DECLARE)

#define LAUNCH(kernel, params, blocks) \
    kernel##__host(params, (unsigned)(blocks), 1, 1, FSDPC_CUDA_THREADS, 1, 1, 0)

enum { SPAN = 16, BIG = 300007 };

static const int64_t sizes[] = {0, 1, 3, 7, 8, 9, 31, 64, 257, 4099, BIG};
enum { SIZES = sizeof sizes / sizeof sizes[0], SCALES = sizeof scales / sizeof scales[0] };

static int64_t
random_below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

/* --- the kernels as a table ------------------------------------------------------------------- */

static void
launch_cast(void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type, int64_t n,
            double scale)
{
    fsdpc_cuda_cast_params p = {
        .dst = dst, .src = src, .n = n, .scale = scale, .dst_type = dst_type, .src_type = src_type};
    LAUNCH(fsdpc_cuda_cast, &p, 1 + n % 3);
}

static void
launch_reduce(void *acc, fsdpc_dtype acc_type, const void *const *src, int count,
              fsdpc_dtype src_type, int64_t n, double scale, bool add)
{
    fsdpc_cuda_reduce_params p = {.acc = acc,
                                  .n = n,
                                  .scale = scale,
                                  .acc_type = acc_type,
                                  .src_type = src_type,
                                  .src_count = count,
                                  .add = add};
    memcpy(p.src, src, (size_t)count * sizeof *src);
    LAUNCH(fsdpc_cuda_reduce, &p, fsdpc_cuda_norm_blocks(n));
}

static void
launch_accumulate(void *acc, fsdpc_dtype acc_type, const void *src, fsdpc_dtype src_type, int64_t n,
                  double scale)
{
    launch_reduce(acc, acc_type, &src, 1, src_type, n, scale, true);
}

static void
launch_refresh(const fsdpc_kernels *table, void *acc, fsdpc_dtype acc_type, const void *grad,
               fsdpc_dtype grad_type, int64_t n)
{
    (void)table;
    fsdpc_cuda_refresh_params p = {
        .acc = acc, .grad = grad, .n = n, .acc_type = acc_type, .grad_type = grad_type};
    LAUNCH(fsdpc_cuda_refresh, &p, 1 + n % 3);
}

static void
launch_scale(void *x, fsdpc_dtype type, int64_t n, double factor)
{
    fsdpc_cuda_scale_params p = {.factor = &factor, .count = 1, .span = {{x, n, 0, type}}};
    LAUNCH(fsdpc_cuda_scale, &p, 1 + n % 3);
}

static fsdpc_cuda_norm_value
summed(const fsdpc_cuda_norm_value *partials, int64_t count)
{
    fsdpc_cuda_norm_value total = {.sum = 5, .max = 0.5};
    fsdpc_cuda_norm_sum_params p = {.partials = partials, .out = &total, .count = count};
    LAUNCH(fsdpc_cuda_norm_sum, &p, 1);
    return total;
}

static fsdpc_cuda_norm_value
launch_norm(const void *src, fsdpc_dtype type, int64_t n, double order)
{
    static fsdpc_cuda_norm_value partials[FSDPC_CUDA_NORM_BLOCKS];
    fsdpc_cuda_norm_params p = {.p = order,
                                .partials = partials,
                                .count = 1,
                                .span = {{(void *)(uintptr_t)src, n, 0, type}}};
    LAUNCH(fsdpc_cuda_norm, &p, fsdpc_cuda_norm_blocks(n));
    return summed(partials, fsdpc_cuda_norm_blocks(n));
}

/* Twice: the same bits. */
static fsdpc_norm
launch_norm2(const void *src, fsdpc_dtype type, int64_t n)
{
    const fsdpc_cuda_norm_value first = launch_norm(src, type, n, 2);
    const fsdpc_cuda_norm_value again = launch_norm(src, type, n, 2);
    CHECK(memcmp(&first, &again, sizeof first) == 0);
    return (fsdpc_norm){first.sum, first.max, first.nonfinite != 0};
}

static const fsdpc_kernels launches = {.name = "cuda",
                                       .cast = launch_cast,
                                       .accumulate = launch_accumulate,
                                       .reduce = launch_reduce,
                                       .norm2 = launch_norm2,
                                       .scale = launch_scale};
static const kernel_set cuda = {
    .table = &launches, .refresh = launch_refresh, .aligned = true, .any_nan = true};

/* --- casts and factors ------------------------------------------------------------------------ */

static void
copies_take_any_address(void)
{
    for (int to = 0; to < SPAN; to++) {
        for (int from = 0; from < SPAN; from++) {
            compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, random_below(70), to, from, 1.0);
            compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, 5000 + random_below(16), to, from, 1.0);
        }
    }
    compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, BIG, 3, 3, 1.0);
}

static void
buffers_are_scaled_in_place_by_a_factor_in_memory(void)
{
    for (int t = 0; t < 4; t++) {
        struct bed bed = new_bed(5003, floats[t], floats[t], 0);
        double factor = 0.37;
        fill_sums(&bed, floats[t], 5003);
        /* Two spans of odd lengths, of two blocks and of one. */
        fsdpc_cuda_scale_params p = {
            .factor = &factor,
            .count = 2,
            .span = {{bed.got, 4001, 0, floats[t]},
                     {bed.got + 4001 * fsdpc_dtype_bytes(floats[t]), 1002, 2, floats[t]}}};
        LAUNCH(fsdpc_cuda_scale, &p, 3);
        plain->scale(bed.want, floats[t], 5003, factor);
        CHECK(as_wanted(&bed, floats[t], 5003, true));
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
    piece->block = new_bytes((size_t)reach * fsdpc_dtype_bytes(piece->type));
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
    piece->block = new_bytes((size_t)(piece->shape[0] + 1) * fsdpc_dtype_bytes(piece->type));
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
    CHECK(memcmp(bed->got + pack->bytes, bed->want + pack->bytes, bed->bytes - pack->bytes) == 0);
}

static void
a_unit_is_packed_in_one_launch(void)
{
    for (int round = 0; round < 24; round++) {
        struct pack pack;
        const double scale = scales[round % SCALES];
        make_pack(&pack, floats[round % 4]);
        struct bed bed = new_bed((int64_t)pack.bytes, FSDPC_BYTES, FSDPC_BYTES, 0);
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

/* --- norms ------------------------------------------------------------------------------------ */

static void
other_norms_are_the_plain_ones(void)
{
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < SIZES; i++) {
            char *src = new_bytes((size_t)sizes[i] * fsdpc_dtype_bytes(floats[t]) + 1);
            fill_ordinary(src, floats[t], sizes[i]);
            const double want = fsdpc_kernel_norm_p(src, floats[t], sizes[i], 3);
            const fsdpc_cuda_norm_value got = launch_norm(src, floats[t], sizes[i], 3);
            CHECK(fabs(got.sum - want) <= 1e-12 * want && got.max == 0 && !got.nonfinite);
            free(src);
        }
    }
    /* More elements than blocks can be. */
    compare_norm(&cuda, FSDPC_F32,
                 (int64_t)FSDPC_CUDA_NORM_BLOCKS * FSDPC_CUDA_NORM_BLOCK_ITEMS / 2 + 77, 0, true);
}

/* A launch of several arrays leaves what launches of one leave. */
static void
norms_of_a_list_are_those_of_its_spans(double order)
{
    static const int64_t counts[] = {1, 5003, 9000, 4096, 3, 40000, 4097};
    enum { COUNTS = sizeof counts / sizeof *counts, ROOM = 64 };
    static fsdpc_cuda_norm_value apart[ROOM], together[ROOM];
    void *blocks_of[COUNTS];
    fsdpc_cuda_norm_params list = {.partials = together, .p = order, .count = COUNTS};
    int64_t blocks = 0;
    for (int i = 0; i < COUNTS; i++) {
        const fsdpc_dtype type = floats[i % 4];
        blocks_of[i] = new_bytes((size_t)counts[i] * fsdpc_dtype_bytes(type));
        fill_ordinary(blocks_of[i], type, counts[i]);
        const fsdpc_cuda_span span = {blocks_of[i], counts[i], 0, type};
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
        free(blocks_of[i]);
    }
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

int
main(void)
{
    kernels_are_the_plain_ones(&cuda, sizes, SIZES);
    copies_take_any_address();
    buffers_are_scaled_in_place_by_a_factor_in_memory();
    a_unit_is_packed_in_one_launch();
    other_norms_are_the_plain_ones();
    norms_of_a_list_are_those_of_its_spans(2);
    norms_of_a_list_are_those_of_its_spans(3);
    many_parts_are_summed_each_once();
    norms_of_units_add_up_to_a_factor();
    return test_result();
}
