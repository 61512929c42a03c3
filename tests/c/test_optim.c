/* Tests of optimizer steps and packed activations. Results have the same bits for every instruction set, for
 * every number of threads, and if a tensor is cut in two. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "activation/activation.h"
#include "convert.h"
#include "optim/optim.h"
#include "kernels.h"
#include "test.h"

enum { MOST = 70000, BLOCKS = MOST / 16 + 2 };

/* Memory of one tensor: parameter, gradient, three states, average, denominators, codes and scales. */
struct memory {
    float p[MOST], g[MOST], s[3][MOST], average[MOST], denominators[BLOCKS], scales[2][BLOCKS];
    uint8_t codes[2][MOST];
};

static float
value(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return ((float)(*seed >> 8) - 8388608.0f) / 8388608.0f;
}

static struct memory *
filled(void)
{
    uint32_t seed = 1;
    struct memory *memory = calloc(1, sizeof *memory);
    REQUIRE(memory != NULL);
    for (int i = 0; i < MOST; i++) {
        memory->p[i] = value(&seed);
        memory->g[i] = value(&seed);
        memory->average[i] = value(&seed);
        for (int s = 0; s < 3; s++) {
            memory->s[s][i] = value(&seed) * value(&seed) + 1;
        }
        memory->codes[0][i] = (uint8_t)(seed >> 24);
        memory->codes[1][i] = (uint8_t)(seed >> 16);
    }
    for (int i = 0; i < BLOCKS; i++) {
        memory->denominators[i] = 1.5f;
        memory->scales[0][i] = memory->scales[1][i] = 0.25f;
    }
    return memory;
}

static fsdpc_optim_rule
rule_of(fsdpc_optim_kind kind)
{
    return (fsdpc_optim_rule){.kind = kind,
                              .lr = 0.1,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .weight_decay = 0.1,
                              .grad_scale = 4,
                              .clip = 0.7,
                              .decoupled = kind != FSDPC_OPTIM_SGD,
                              .nesterov = true,
                              .averages = true,
                              .average_weight = kind == FSDPC_OPTIM_LION ? 0.7 : 0.1};
}

/* Returns the tensor by which a step updates elements [begin, begin + n) of the memory. The memory holds a
 * part of a parameter; the part begins with the parameter's element `first`. */
static fsdpc_optim_tensor
tensor_of(struct memory *memory, fsdpc_optim_kind kind, int64_t first, int64_t begin, int64_t n)
{
    fsdpc_optim_tensor t = {.param = memory->p + begin,
                            .grad = memory->g + begin,
                            .states = {memory->s[0] + begin},
                            .average = memory->average + begin,
                            .numel = n,
                            .first = first + begin,
                            .block = 16,
                            .step = 3};
    if (kind == FSDPC_OPTIM_ADAM) {
        t.states[1] = memory->s[1] + begin;
        t.states[2] = memory->s[2] + begin;
    } else if (kind == FSDPC_OPTIM_MINI) {
        t.states[1] = memory->denominators + (first + begin) / 16 - first / 16;
    }
    return t;
}

static void
step_all(struct memory *memory, int64_t first, int64_t cut, int threads)
{
    for (int kind = FSDPC_OPTIM_ADAM; kind <= FSDPC_OPTIM_MINI; kind++) {
        const fsdpc_optim_rule rule = rule_of((fsdpc_optim_kind)kind);
        const fsdpc_optim_tensor parts[] = {
            tensor_of(memory, rule.kind, first, 0, cut),
            tensor_of(memory, rule.kind, first, cut, MOST - cut),
        };
        REQUIRE_OK(fsdpc_optim_step(&rule, parts, 2, threads));
    }
}

/* A step with keeps_grads multiplies by the inverse of the scale and does not change the gradients in memory.
 * It gives the same bits as a step that divides the gradients in memory by the scale. The copy of a parameter
 * has the rounded values. */
static void
folded_scale_and_copies(void)
{
    static uint16_t copies[2][MOST];
    for (int kind = FSDPC_OPTIM_ADAM; kind <= FSDPC_OPTIM_MINI; kind++) {
        struct memory *both[2];
        for (int folded = 0; folded < 2; folded++) {
            struct memory *memory = both[folded] = filled();
            struct memory *before = filled();
            fsdpc_optim_rule rule = rule_of((fsdpc_optim_kind)kind);
            fsdpc_optim_tensor tensor = tensor_of(memory, rule.kind, 5, 0, MOST);
            rule.decoupled = true;
            rule.keeps_grads = folded;
            tensor.copy = copies[folded];
            tensor.copy_type = FSDPC_BF16;
            REQUIRE_OK(fsdpc_optim_step(&rule, &tensor, 1, 1));
            CHECK((memcmp(memory->g, before->g, sizeof memory->g) == 0) == (folded == 1));
            for (int i = 0; i < MOST; i++) {
                CHECK(copies[folded][i] == f32_to_bf16(memory->p[i]));
            }
            free(before);
        }
        CHECK(memcmp(both[0]->p, both[1]->p, sizeof both[0]->p) == 0);
        CHECK(memcmp(both[0]->s, both[1]->s, sizeof both[0]->s) == 0);
        free(both[0]);
        free(both[1]);
    }
}

static void
step_eight_bits(struct memory *memory, int threads)
{
    const fsdpc_optim_rule rule = rule_of(FSDPC_OPTIM_ADAM);
    fsdpc_optim_tensor t = tensor_of(memory, FSDPC_OPTIM_ADAM, 300, 0, MOST);
    for (int i = 0; i < 2; i++) {
        t.states[i] = memory->codes[i];
        t.scales[i] = memory->scales[i];
    }
    t.states[2] = NULL;
    REQUIRE_OK(fsdpc_optim_step8(&rule, &t, 1, threads));
}

/* A step moves the average towards the parameter's new values, by the formula of optim.h. A rule without
 * `averages` does not change the average. */
static void
averages_follow_the_new_values(void)
{
    struct memory *memory = filled(), *before = filled();
    fsdpc_optim_rule rule = rule_of(FSDPC_OPTIM_ADAM);
    const fsdpc_optim_tensor tensor = tensor_of(memory, FSDPC_OPTIM_ADAM, 5, 0, MOST);
    rule.averages = false;
    REQUIRE_OK(fsdpc_optim_step(&rule, &tensor, 1, 1));
    CHECK(memcmp(memory->average, before->average, sizeof memory->average) == 0);
    for (int w = 0; w < 2; w++) {
        const float weight = w == 0 ? 0.25f : 0.75f;
        memcpy(before->average, memory->average, sizeof memory->average);
        rule.averages = true;
        rule.average_weight = (double)weight;
        REQUIRE_OK(fsdpc_optim_step(&rule, &tensor, 1, 2));
        for (int i = 0; i < MOST; i++) {
            const float a = before->average[i], p = memory->p[i];
            CHECK(memory->average[i] ==
                  (w == 0 ? fmaf(weight, p - a, a) : fmaf(weight - 1, p - a, p)));
        }
    }
    free(memory);
    free(before);
}

/* Makes a step with each of the four mixes of bfloat16 and float32 parameters and gradients, rounded
 * stochastically, and a fifth step, all in bfloat16, rounded to nearest. */
static void
step_low(struct memory *memory, int64_t cut, int threads)
{
    for (int mix = 0; mix < 5; mix++) {
        fsdpc_optim_rule rule = rule_of(FSDPC_OPTIM_ADAM);
        fsdpc_optim_tensor parts[2];
        const bool low_p = mix % 2 == 0, low_g = mix != 1 && mix != 2;
        rule.stochastic = mix < 4;
        rule.grad_scale = rule.clip = 1;
        for (int i = 0; i < 2; i++) {
            const int64_t begin = i == 0 ? 0 : cut;
            parts[i] = (fsdpc_optim_tensor){
                .param = (char *)memory->p + begin * (low_p ? 2 : 4),
                .grad = (char *)memory->g + begin * (low_g ? 2 : 4),
                .states = {(uint16_t *)memory->s[0] + begin, (uint16_t *)memory->s[1] + begin},
                .average = memory->average + begin,
                .param_type = low_p ? FSDPC_BF16 : FSDPC_F32,
                .grad_type = low_g ? FSDPC_BF16 : FSDPC_F32,
                .state_type = FSDPC_BF16,
                .numel = i == 0 ? cut : MOST - cut,
                .first = 77 + begin,
                .step = 3};
        }
        REQUIRE_OK(fsdpc_optim_step(&rule, parts, 2, threads));
    }
}

static void
pack_gradient(struct memory *memory)
{
    int8_t *codes = (int8_t *)memory->codes[0];
    REQUIRE_OK(fsdpc_activation_pack(memory->g, FSDPC_F32, MOST, codes, memory->scales[0]));
    REQUIRE_OK(fsdpc_activation_unpack(codes, memory->scales[0], MOST, memory->s[0], FSDPC_F32));
}

static struct memory *
stepped(const char *simd, int64_t first, int64_t cut, int threads)
{
    struct memory *memory = filled();
    setenv("FSDPC_SIMD", simd, 1);
    step_all(memory, first, cut, threads);
    step_eight_bits(memory, threads);
    step_low(memory, cut + 1, threads);
    pack_gradient(memory);
    unsetenv("FSDPC_SIMD");
    return memory;
}

static void
every_way_gives_the_same_bits(void)
{
    static const char *const simds[] = {"plain", "avx2", "avx512"};
    struct memory *expected = stepped("plain", 0, 32768, 1);
    for (int i = 0; i < 3; i++) {
        const fsdpc_kernels *kernels;
        if (fsdpc_kernels_by_name(simds[i], &kernels) != FSDPC_OK) {
            continue;
        }
        for (int64_t cut = 0; cut <= 1040; cut += 520) {
            struct memory *found = stepped(simds[i], 0, cut, (int)(cut / 520) + 1);
            CHECK(memcmp(found, expected, sizeof *found) == 0);
            free(found);
        }
    }
    free(expected);
}

static void
sums_do_not_depend_on_threads(void)
{
    struct memory *memory = filled();
    void *const data[] = {memory->p, memory->g};
    const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_F32};
    const int64_t numels[] = {MOST, MOST - 5};
    double one, three;
    REQUIRE_OK(fsdpc_optim_sum_squares(data, types, numels, 2, 1, &one));
    REQUIRE_OK(fsdpc_optim_sum_squares(data, types, numels, 2, 3, &three));
    CHECK(one == three && one > 0);
    free(memory);
}

static void
types_that_do_not_go_together_are_refused(void)
{
    const fsdpc_optim_rule rule = rule_of(FSDPC_OPTIM_ADAM);
    struct memory *memory = filled();
    fsdpc_optim_tensor t = tensor_of(memory, FSDPC_OPTIM_ADAM, 0, 0, 10);
    t.param_type = FSDPC_F64;
    CHECK_ERROR(fsdpc_optim_step(&rule, &t, 1, 1), FSDPC_E_TYPE, "float64 cannot be mixed");
    CHECK_ERROR(fsdpc_optim_step8(&rule, &t, 1, 1), FSDPC_E_TYPE, "states of 8 bits");
    t.param_type = FSDPC_BYTES;
    CHECK_ERROR(fsdpc_optim_step(&rule, &t, 1, 1), FSDPC_E_TYPE, "not of a float type");
    CHECK_ERROR(fsdpc_activation_pack(memory->p, FSDPC_F64, 1, NULL, NULL), FSDPC_E_TYPE,
                "float64");
    free(memory);
}

int
main(void)
{
    every_way_gives_the_same_bits();
    sums_do_not_depend_on_threads();
    folded_scale_and_copies();
    averages_follow_the_new_values();
    types_that_do_not_go_together_are_refused();
    return test_result();
}
