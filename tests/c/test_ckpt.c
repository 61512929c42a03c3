/* Tests of checkpoint files: digests, valid and invalid headers, and ranges that are written and read.
 *
 *     build/c/address-undefined/test_ckpt [count [seed]]    try `count` mutated headers, made from `seed`
 */
#include "test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/crc32c.h"
#include "ckpt/header.h"
#include "ckpt/range_io.h"
#include "kernels.h"

static char path[] = "/tmp/fsdpc-test-ckpt-XXXXXX";

/* --- digests --------------------------------------------------------------------------------- */

static void
digests_are_crc32c(void)
{
    CHECK_INT(fsdpc_crc32c(0, "123456789", 9), 0xE3069283);
    CHECK_INT(fsdpc_crc32c_plain(0, "123456789", 9), 0xE3069283);
    CHECK_INT(fsdpc_crc32c(0, "", 0), 0);
}

static void
parts_combine_for_any_cut(void)
{
    enum { BYTES = 20000 };
    static unsigned char data[BYTES];
    for (int i = 0; i < BYTES; i++) {
        data[i] = (unsigned char)(i * i + i / 251);
    }
    const uint32_t whole = fsdpc_crc32c_plain(0, data, BYTES);
    uint64_t sum, word, expected = 0;
    CHECK_INT(fsdpc_crc32c_and_sum(0, data, BYTES, &sum), whole);
    for (size_t i = 0; i + sizeof word <= BYTES; i += sizeof word) {
        memcpy(&word, data + i, sizeof word);
        expected += word;
    }
    CHECK(sum == expected);
    CHECK_INT(fsdpc_crc32c(0, data, BYTES), whole);
    for (size_t cut = 0; cut <= BYTES; cut += cut < 20 ? 1 : 997) {
        const uint32_t a = fsdpc_crc32c(0, data, cut);
        const uint32_t b = fsdpc_crc32c(0, data + cut, BYTES - cut);
        CHECK_INT(fsdpc_crc32c_combine(a, b, BYTES - cut), whole);
        CHECK_INT(fsdpc_crc32c(a, data + cut, BYTES - cut), whole);
        CHECK_INT(fsdpc_crc32c_plain(0, data + cut, BYTES - cut), b);
    }
}

/* --- headers --------------------------------------------------------------------------------- */

#define A(fields) "{\"a\":{" fields "}}"
#define F32_2 "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"

static const struct {
    const char *json;
    int64_t data_bytes;
    const char *problem; /* a part of the error text; NULL: the header is valid */
} headers[] = {
    {"{}", 0, NULL},
    {A(F32_2), 8, NULL},
    {A(F32_2) " \n\t ", 8, NULL},
    {"{\"__metadata__\":{\"format\":\"pt\"},\"a\":{" F32_2 "}}", 8, NULL},
    {"{\"__metadata__\":null}", 0, NULL},
    {A("\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]"), 4, NULL},
    {A("\"dtype\":\"F32\",\"shape\":[0,9],\"data_offsets\":[0,0]"), 0, NULL},
    {A(F32_2 ",\"later\":[{\"x\":[1.5e-3,null,{}]},[],\"\"]"), 8, NULL},
    {"{\"\\u00e9\\ud83d\\ude00\":{" F32_2 "}}", 8, NULL},
    {"", 0, "begins"},
    {" {}", 0, "begins"},
    {"[]", 0, "begins"},
    {"{}x", 0, "behind the end"},
    {"{\"a\"", 0, "expected ':'"},
    {"{\"a\":1}", 0, "expected '{'"},
    {A(F32_2), 9, "cut or never finished"},
    {A(F32_2), 7, "cut or never finished"},
    {A("\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]"), 8, "unknown dtype"},
    {A("\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]"), 1, "do not match"},
    {A("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]"), 4, "do not match"},
    {A("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]"), 8, "do not match"},
    {A("\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]"), 8, "not negative"},
    {A("\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]"), 8, "not negative"},
    {A("\"dtype\":\"F32\",\"shape\":[02],\"data_offsets\":[0,8]"), 8, "not negative"},
    {A("\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]"), 8, "above"},
    {A("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0, "2^63"},
    {A("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]"), 8, "expected ']'"},
    {A("\"dtype\":\"F32\",\"shape\":[2]"), 8, "it needs"},
    {A(F32_2 ",\"dtype\":\"F32\""), 8, "twice"},
    {"{\"a\":{" F32_2 "},\"a\":{" F32_2 "}}", 8, "twice"},
    {"{\"a\":{" F32_2 "},\"b\":{" F32_2 "}}", 8, "overlaps"},
    {A("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]"), 16, "gap"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "expected '\"'"},
    {"{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
    {"{\"\xff\":{" F32_2 "}}", 8, "UTF-8"},
    {"{\"\xc0\x80\":{" F32_2 "}}", 8, "UTF-8"},
    {"{\"\xed\xa0\x80\":{" F32_2 "}}", 8, "UTF-8"},
    {"{\"\\ud800\":{" F32_2 "}}", 8, "surrogate"},
    {"{\"\\uZZZZ\":{" F32_2 "}}", 8, "four digits"},
    {"{\"\\x\":{" F32_2 "}}", 8, "unknown escape"},
    {"{\"a\n\":{" F32_2 "}}", 8, "control"},
    {"{\"a", 8, "without end"},
    {A(F32_2 ",\"later\":[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]"), 8, "too deep"},
    {A(F32_2 ",\"later\":1-2"), 8, "expected a value"},
    {A(F32_2 ",\"later\":[1}"), 8, "expected ']'"},
};

static void
headers_are_checked(void)
{
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        fsdpc_header header;
        const size_t bytes = strlen(headers[i].json);
        /* The copy has no NUL at its end, so that ASan sees reads past the end. */
        char *exact = malloc(bytes ? bytes : 1);
        memcpy(exact, headers[i].json, bytes);
        if (headers[i].problem != NULL) {
            CHECK_ERROR(fsdpc_header_parse(exact, bytes, headers[i].data_bytes, &header),
                        FSDPC_E_INVAL, headers[i].problem);
        } else {
            CHECK_INT(fsdpc_header_parse(exact, bytes, headers[i].data_bytes, &header), FSDPC_OK);
            fsdpc_header_clear(&header);
        }
        /* A header that is cut short is refused, unless only blanks are cut off. */
        for (size_t cut = 0; cut < bytes; cut++) {
            char *part = malloc(cut ? cut : 1);
            memcpy(part, headers[i].json, cut);
            if (fsdpc_header_parse(part, cut, headers[i].data_bytes, &header) == FSDPC_OK) {
                CHECK(part[cut - 1] == '}' || strchr(" \n\t", part[cut - 1]));
                fsdpc_header_clear(&header);
            }
            free(part);
        }
        free(exact);
    }
    CHECK_INT(fsdpc_mem_live(), 0);
}

/* --- mutated headers ------------------------------------------------------------------------- */

enum { MUTANT_BYTES = 1024, MUTANTS = 50000, VALID = 9 };

static uint64_t random_state;

static uint64_t
draw(uint64_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % below;
}

/* Replaces `cut` bytes at offset `at` by the `count` bytes of `by`, and returns the new length. */
static size_t
replace(char *json, size_t bytes, size_t at, size_t cut, const char *by, size_t count)
{
    if (bytes - cut + count > MUTANT_BYTES) {
        return bytes;
    }
    memmove(json + at + count, json + at + cut, bytes - at - cut);
    memcpy(json + at, by, count);
    return bytes - cut + count;
}

static size_t
mutate(char *json, size_t bytes)
{
    static const char *const words[] = {"\"",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\\u0000",
                                        "\\ud83d\\ude00",
                                        "-",
                                        "null",
                                        "\\",
                                        "\0",
                                        "18446744073709551615",
                                        "\xf0\x9f",
                                        "9223372036854775807",
                                        "[[[[[[[[",
                                        "{\"a\":",
                                        "__metadata__",
                                        "F32",
                                        "BOOL",
                                        "data_offsets",
                                        "1e9",
                                        " ",
                                        "0",
                                        "8"};
    const size_t at = draw(bytes + 1), rest = bytes - at, cut = draw(rest < 9 ? rest + 1 : 9);
    const char *word = words[draw(sizeof words / sizeof *words)];
    const char byte = (char)draw(256);
    char copy[32];
    const size_t from = draw(bytes + 1), left = bytes - from, count = left < 32 ? left : draw(32);
    memcpy(copy, json + from, count);
    switch (draw(4)) {
    case 0:
        return replace(json, bytes, at, cut < 2 ? cut : 1, &byte, 1);
    case 1:
        return replace(json, bytes, at, cut, "", 0);
    case 2:
        return replace(json, bytes, at, cut, word, *word ? strlen(word) : 1);
    default:
        return replace(json, bytes, at, cut, copy, count);
    }
}

/* Checks that an accepted header covers the data and that all its texts can be read. */
static void
check_accepted(const fsdpc_header *header, int64_t data_bytes)
{
    int64_t end = 0;
    unsigned char sum = 0;
    for (size_t i = 0; i < header->tensor_count; i++) {
        const fsdpc_header_tensor *tensor = &header->tensors[i];
        CHECK_INT(tensor->begin, end);
        CHECK(tensor->end >= tensor->begin && strlen(tensor->dtype) > 1);
        end = tensor->end;
        for (int j = 0; j < tensor->ndim; j++) {
            CHECK(header->dims[tensor->first_dim + (size_t)j] >= 0);
        }
        for (size_t j = 0; j < tensor->name.bytes; j++) {
            sum ^= (unsigned char)tensor->name.text[j];
        }
    }
    for (size_t i = 0; i < 2 * header->metadata_count; i++) {
        for (size_t j = 0; j < header->metadata[i].bytes; j++) {
            sum ^= (unsigned char)header->metadata[i].text[j];
        }
    }
    static volatile unsigned char seen;
    seen = sum;
    (void)seen;
    CHECK_INT(end, data_bytes);
}

static void
mutated_headers_are_refused_or_right(long count, uint64_t seed)
{
    long accepted = 0;
    random_state = seed * 2 + 1;
    for (long i = 0; i < count; i++) {
        const size_t which = draw(draw(2) ? VALID : sizeof headers / sizeof *headers);
        char json[MUTANT_BYTES];
        size_t bytes = strlen(headers[which].json);
        memcpy(json, headers[which].json, bytes);
        for (uint64_t rounds = 1 + draw(4); rounds > 0; rounds--) {
            bytes = mutate(json, bytes);
        }
        char *exact = malloc(bytes ? bytes : 1);
        memcpy(exact, json, bytes);
        const int64_t data_bytes = draw(8) ? headers[which].data_bytes : (int64_t)draw(64);
        fsdpc_header header;
        const int status = fsdpc_header_parse(exact, bytes, data_bytes, &header);
        free(exact); /* the parsed header must not point into `exact` */
        if (status == FSDPC_OK) {
            check_accepted(&header, data_bytes);
            fsdpc_header_clear(&header);
            accepted++;
        } else {
            CHECK_INT(status, FSDPC_E_INVAL);
        }
    }
    printf("%ld mutated headers from seed %llu, %ld of them valid\n", count,
           (unsigned long long)seed, accepted);
    CHECK(accepted > 0 && accepted < count);
    CHECK_INT(fsdpc_mem_live(), 0);
}

static int
parse_big(void *unused)
{
    fsdpc_header header;
    const char *json = "{\"__metadata__\":{\"k\":\"v\"},\"b\":{\"dtype\":\"U8\",\"shape\":[1],"
                       "\"data_offsets\":[8,9]},\"a\":{" F32_2 "}}";
    (void)unused;
    FSDPC_TRY(fsdpc_header_parse(json, strlen(json), 9, &header));
    CHECK_STR(header.tensors[0].dtype, "F32");
    CHECK_INT(header.tensors[1].begin, 8);
    CHECK_INT(header.metadata_count, 1);
    fsdpc_header_clear(&header);
    return FSDPC_OK;
}

/* --- ranges ---------------------------------------------------------------------------------- */

enum { COUNT = 3000000, BLOCK = 1 << 20 };

static int
read_back(const fsdpc_file_range *ranges, size_t count, uint32_t *digests)
{
    int fd;
    FSDPC_TRY(fsdpc_file_open(path, O_RDONLY, &fd));
    const int status = fsdpc_range_read(fd, path, ranges, count, BLOCK, digests);
    close(fd);
    return status;
}

static void
check_round_trip(bool direct, fsdpc_dtype file_type, int64_t first)
{
    const int64_t item = (int64_t)fsdpc_dtype_bytes(file_type);
    float *values = malloc(COUNT * sizeof *values), *back = calloc(COUNT, sizeof *back);
    for (int i = 0; i < COUNT; i++) {
        values[i] = (float)(i % 199) / 8;
    }
    /* Two ranges of one tensor, with a gap between them. */
    const int64_t half = COUNT / 2 + 1;
    fsdpc_file_range ranges[] = {
        {values, first, half * item, 0, FSDPC_F32, file_type},
        {values + half, first + half * item + 77, (COUNT - half) * item, half * item, FSDPC_F32,
         file_type},
    };
    const int64_t parts = fsdpc_range_digests(ranges, 2, BLOCK);
    uint32_t *digests = calloc((size_t)parts, 4), *read = calloc((size_t)parts, 4);
    fsdpc_write_options options = {.block_bytes = BLOCK, .direct = direct};
    fsdpc_write_result result;
    REQUIRE(truncate(path, 0) == 0);
    REQUIRE_OK(fsdpc_range_write(path, ranges, 2, &options, digests, &result));
    CHECK_INT(result.direct_bytes + result.cached_bytes, COUNT * item);
    ranges[0].memory = back;
    ranges[1].memory = back + half;
    REQUIRE_OK(read_back(ranges, 2, read));
    CHECK(memcmp(values, back, COUNT * sizeof *values) == 0);
    CHECK(memcmp(digests, read, (size_t)parts * 4) == 0);
    /* The digests of the parts combine to the digest of the whole tensor. */
    unsigned char *whole = malloc((size_t)(COUNT * item));
    REQUIRE(fsdpc_kernels_plain() != NULL);
    fsdpc_kernels_plain()->cast(whole, file_type, values, FSDPC_F32, COUNT, 1.0);
    uint32_t crc = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t edge = at < half * item ? half * item : COUNT * item;
        const int64_t block_end = (at / BLOCK + 1) * BLOCK;
        const int64_t end = block_end < edge ? block_end : edge;
        crc = fsdpc_crc32c_combine(crc, digests[i], (uint64_t)(end - at));
        at = end;
    }
    CHECK_INT(crc, fsdpc_crc32c(0, whole, (size_t)(COUNT * item)));
    free(whole);
    free(values);
    free(back);
    free(digests);
    free(read);
}

static void
edges_of_pages_can_be_left_out(void)
{
    enum { BYTES = 100000, FIRST = 100 };
    static unsigned char data[BYTES], back[BYTES];
    memset(data, 7, BYTES);
    fsdpc_file_range range = {data, FIRST, BYTES, 0, FSDPC_BYTES, FSDPC_BYTES};
    fsdpc_write_options options = {.block_bytes = BLOCK, .direct = true, .skip_edges = true};
    fsdpc_write_result result;
    uint32_t digest;
    REQUIRE(truncate(path, 0) == 0 && truncate(path, FIRST + BYTES) == 0);
    REQUIRE_OK(fsdpc_range_write(path, &range, 1, &options, &digest, &result));
    range.memory = back;
    REQUIRE_OK(read_back(&range, 1, &digest));
    for (int64_t i = 0; i < BYTES; i++) {
        const int64_t place = FIRST + i;
        const bool edge = place < 4096 || place >= (FIRST + BYTES) / 4096 * 4096;
        REQUIRE(back[i] == (edge ? 0 : 7));
    }
}

/* Writes and reads thousands of short ranges. Between them are long ranges, which begin and end inside of
 * pages. */
static void
many_runs_arrive(bool direct)
{
    enum { RUNS = 4000, GAP = 5, LONG = 200001, EVERY = 500 };
    static fsdpc_file_range ranges[RUNS];
    static uint32_t digests[RUNS + 1], read[RUNS + 1];
    int64_t bytes = 0, end = 1;
    for (int i = 0; i < RUNS; i++) {
        const int64_t each = i % EVERY == 0 ? LONG : 700 + i % 97;
        ranges[i] = (fsdpc_file_range){NULL, end, each, 0, FSDPC_BYTES, FSDPC_BYTES};
        end += each + GAP;
        bytes += each;
    }
    unsigned char *data = malloc((size_t)bytes), *back = calloc(1, (size_t)bytes);
    for (int64_t at = 0; at < bytes; at++) {
        data[at] = (unsigned char)(at * 2654435761 >> 13);
    }
    for (int64_t i = 0, at = 0; i < RUNS; at += ranges[i++].bytes) {
        ranges[i].memory = data + at;
    }
    fsdpc_write_options options = {.block_bytes = BLOCK, .direct = direct};
    fsdpc_write_result result;
    REQUIRE(truncate(path, 0) == 0);
    REQUIRE_OK(fsdpc_range_write(path, ranges, RUNS, &options, digests, &result));
    CHECK_INT(result.direct_bytes + result.cached_bytes, bytes);
    for (int64_t i = 0; i < RUNS; i++) {
        ranges[i].memory = back + ((unsigned char *)ranges[i].memory - data);
    }
    REQUIRE_OK(read_back(ranges, RUNS, read));
    CHECK(memcmp(data, back, (size_t)bytes) == 0);
    CHECK(memcmp(digests, read, RUNS * sizeof *read) == 0);
    free(data);
    free(back);
}

/* Writing the whole pages succeeds, but writing the partial page after them fails. */
static void
an_edge_that_fails_is_an_error(void)
{
    enum { PAGES = 40, BYTES = PAGES * 4096 + 9 };
    static unsigned char data[BYTES];
    fsdpc_file_range range = {data, 0, BYTES, 0, FSDPC_BYTES, FSDPC_BYTES};
    fsdpc_write_options options = {.block_bytes = BLOCK, .direct = true};
    fsdpc_write_result result;
    uint32_t digest;
    struct rlimit before, small;
    REQUIRE(truncate(path, 0) == 0 && getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = (struct rlimit){(rlim_t)PAGES * 4096, before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK_ERROR(fsdpc_range_write(path, &range, 1, &options, &digest, &result), FSDPC_E_IO,
                "at byte 163840: File too large");
    REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
}

static void
faults_name_the_file(void)
{
    unsigned char byte[16] = {0};
    uint32_t digest[2];
    fsdpc_write_options options = {.block_bytes = BLOCK};
    fsdpc_write_result result;
    fsdpc_file_range range = {byte, 0, 16, 0, FSDPC_BYTES, FSDPC_BYTES};
    REQUIRE(truncate(path, 10) == 0);
    CHECK_ERROR(read_back(&range, 1, digest), FSDPC_E_IO, "6 bytes early");
    CHECK_ERROR(fsdpc_range_read(-1, "/nowhere/x", &range, 1, BLOCK, digest), FSDPC_E_IO,
                "/nowhere/x");
    CHECK_ERROR(fsdpc_range_write("/dev/full", &range, 1, &options, digest, &result), FSDPC_E_INVAL,
                "regular");
    fsdpc_file_range two[] = {range, range};
    CHECK_ERROR(fsdpc_range_write(path, two, 2, &options, digest, &result), FSDPC_E_INVAL,
                "overlap");
    two[1].memory = NULL;
    two[1].file_offset = range.file_offset + range.bytes;
    CHECK_ERROR(fsdpc_range_write(path, two, 2, &options, digest, &result), FSDPC_E_INVAL,
                "range 1 of");
    range.bytes = -1;
    CHECK_INT(fsdpc_range_digests(&range, 1, BLOCK), -1);
    range = (fsdpc_file_range){byte, INT64_MAX, 16, 0, FSDPC_BYTES, FSDPC_BYTES};
    CHECK_INT(fsdpc_range_digests(&range, 1, BLOCK), -1);
    range = (fsdpc_file_range){byte, 0, 3, 0, FSDPC_F32, FSDPC_BF16};
    CHECK_INT(fsdpc_range_digests(&range, 1, BLOCK), -1);
    range = (fsdpc_file_range){byte, 0, 4, 0, FSDPC_BYTES, FSDPC_F32};
    CHECK_INT(fsdpc_range_digests(&range, 1, BLOCK), -1);
}

int
main(int argc, char **argv)
{
    const long mutants = argc > 1 ? atol(argv[1]) : MUTANTS;
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    digests_are_crc32c();
    parts_combine_for_any_cut();
    headers_are_checked();
    mutated_headers_are_refused_or_right(mutants, argc > 2 ? strtoull(argv[2], NULL, 10) : 1);
    test_alloc_sweep(parse_big, NULL);
    check_round_trip(true, FSDPC_F32, 4096);
    check_round_trip(true, FSDPC_BF16, 4095);
    check_round_trip(false, FSDPC_F32, 3);
    edges_of_pages_can_be_left_out();
    many_runs_arrive(true);
    many_runs_arrive(false);
    an_edge_that_fails_is_an_error();
    faults_name_the_file();
    close(fd);
    unlink(path);
    return test_result();
}
