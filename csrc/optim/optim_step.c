/* One step in a single pass over the memory of many tensors.
 *
 * The rule is applied to each part of a tensor tile by tile. float32 and float64 memory is used in place;
 * other types pass through buffers of the size of a tile, which fit in the first-level cache. In both cases
 * memory is read and written once.
 */
#include "optim/optim_impl.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "convert.h"
#include "random.h"

static const fsdpc_optim_rules *
rules_of(const fsdpc_optim_loops *loops, const fsdpc_optim_tensor *tensor)
{
    return tensor->param_type == FSDPC_F64 ? &loops->f64 : &loops->f32;
}

static bool
decays_gradients(const fsdpc_optim_rule *rule)
{
    return rule->weight_decay != 0 && !rule->decoupled;
}

static double
factor_of(const fsdpc_optim_rule *rule)
{
    return rule->maximize ? -rule->clip : rule->clip;
}

/* True if the loops may multiply by the inverse of the scale. The inverse is exact if the scale is a power of
 * two, as scales are by default. The step must also not need the divided gradient itself. */
static bool
folds_scale(const fsdpc_optim_rule *rule)
{
    int exponent;
    return rule->keeps_grads && !decays_gradients(rule) &&
           frexp(rule->grad_scale, &exponent) == 0.5 && exponent > -100 && exponent < 100;
}

/* AMD processors prefetch four streams in time by themselves; prefetches in the loop slow a step by 10%. */
static bool
loops_prefetch(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    return !__builtin_cpu_is("amd");
#else
    return true;
#endif
}

fsdpc_optim_numbers
fsdpc_optim_numbers_of(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor)
{
    fsdpc_optim_numbers k = {.decay = 1, .eps = rule->eps, .factor = 1, .nesterov = rule->nesterov};
    k.prefetches = loops_prefetch();
    k.inverse = folds_scale(rule) ? 1 / rule->grad_scale : 1;
    if (rule->decoupled) {
        k.decay = 1 - rule->lr * rule->weight_decay;
    }
    if (!decays_gradients(rule)) {
        k.factor = factor_of(rule);
    }
    k.beta1 = rule->beta1;
    k.beta2 = rule->beta2;
    k.weight1 = 1 - rule->beta1;
    k.weight2 = 1 - rule->beta2;
    k.size = -rule->lr;
    if (rule->kind == FSDPC_OPTIM_SGD) {
        k.first = tensor->step == 1;
        k.weight1 = 1 - rule->beta2;
    } else if (rule->kind != FSDPC_OPTIM_LION) {
        k.root = sqrt(1 - pow(rule->beta2, tensor->step));
        k.size = -(rule->lr / (1 - pow(rule->beta1, tensor->step)));
    }
    return k;
}

void
fsdpc_optim_make_quick(fsdpc_optim_numbers *k)
{
    k->root = 1 / k->root;
    k->size = -k->size;
}

/* --- memory of any type ------------------------------------------------------------------------ */

static void *
at(void *memory, fsdpc_dtype type, int64_t index)
{
    return (char *)memory + (size_t)index * fsdpc_dtype_bytes(type);
}

float *
fsdpc_optim_load(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type, int64_t begin,
                 int64_t n, float *buffer)
{
    if (type == FSDPC_F32 || type == FSDPC_F64) {
        return at(memory, type, begin);
    }
    const uint16_t *from = at(memory, type, begin);
    if (type == FSDPC_BF16) {
        loops->from_bf16(buffer, from, n);
    } else {
        for (int64_t i = 0; i < n; i++) {
            buffer[i] = f16_to_f32(from[i]);
        }
    }
    return buffer;
}

void
fsdpc_optim_store(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type, int64_t begin,
                  int64_t n, const float *values)
{
    uint16_t *to = at(memory, type, begin);
    if (type == FSDPC_BF16) {
        loops->to_bf16(to, values, n);
    } else if (type == FSDPC_F16) {
        for (int64_t i = 0; i < n; i++) {
            to[i] = f32_to_f16(values[i]);
        }
    }
}

void
fsdpc_optim_average_tile(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                         const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n)
{
    _Alignas(64) float buffer[FSDPC_OPTIM_TILE];
    const fsdpc_dtype type = tensor->param_type, wide = type == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    const bool averages = rule->averages && tensor->average != NULL;
    for (int64_t done = 0, count; averages && done < n; done += count) {
        count = n - done < FSDPC_OPTIM_TILE ? n - done : FSDPC_OPTIM_TILE;
        const void *p = fsdpc_optim_load(loops, tensor->param, type, begin + done, count, buffer);
        rules_of(loops, tensor)
            ->average(at(tensor->average, wide, begin + done), p, rule->average_weight, count);
    }
}

/* Returns the key of a tile's random bits, which also depend on the low half of each element's index. The
 * high half is the same for the whole tile: see tile_length. */
static uint64_t
random_key(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor, uint64_t index)
{
    return fsdpc_random_key(fsdpc_random_of_step(rule->seed, tensor->key, tensor->step), index);
}

const void *
fsdpc_optim_gradient(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                     const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n, const void *param,
                     bool write, void *buffer)
{
    const fsdpc_optim_rules *rules = rules_of(loops, tensor);
    const fsdpc_dtype type = tensor->grad_type;
    const void *grad = fsdpc_optim_load(loops, tensor->grad, type, begin, n, buffer);
    if (rule->grad_scale != 1 && !folds_scale(rule)) {
        rules->divide(buffer, grad, rule->grad_scale, n);
        grad = buffer;
        write = write && !rule->keeps_grads;
        if (write && (type == FSDPC_F32 || type == FSDPC_F64)) {
            memcpy(at(tensor->grad, type, begin), buffer, (size_t)n * fsdpc_dtype_bytes(type));
        } else if (write) {
            fsdpc_optim_store(loops, tensor->grad, type, begin, n, buffer);
        }
    }
    if (decays_gradients(rule)) {
        rules->multiply(buffer, grad, factor_of(rule), n);
        rules->add_scaled(buffer, param, rule->weight_decay, n);
        grad = buffer;
    }
    return grad;
}

/* --- the pass ---------------------------------------------------------------------------------- */

enum { FIRST_LINES = 4, READ_AGAIN_TILE = 4096 };

struct pass {
    const fsdpc_optim_loops *loops;
    const fsdpc_optim_rule *rule;
    const fsdpc_optim_tensor *tensors;
    int count;
    fsdpc_optim_numbers *numbers; /* one per tensor */
    fsdpc_optim_meter meter;
};

/* Steps elements [begin, begin + n). The elements of each block share the block's denominator. */
static void
mini_blocks(const fsdpc_optim_rules *rules, const fsdpc_optim_tensor *tensor,
            const fsdpc_optim_numbers *k, int64_t begin, int64_t n, char *p, const char *g, char *m)
{
    const size_t item = tensor->param_type == FSDPC_F64 ? 8 : 4;
    const int64_t first_block = tensor->first / tensor->block;
    const float *denominators = tensor->states[1];
    int64_t done = 0;
    while (done < n) {
        const int64_t index = tensor->first + begin + done;
        const int64_t left = tensor->block - index % tensor->block;
        const int64_t count = left < n - done ? left : n - done;
        const size_t offset = (size_t)done * item;
        rules->mini(k, (double)denominators[index / tensor->block - first_block], count, p + offset,
                    g + offset, m + offset);
        done += count;
    }
}

static void
step_tile(const struct pass *pass, const fsdpc_optim_tensor *tensor, const fsdpc_optim_numbers *k,
          int64_t begin, int64_t n)
{
    /* The buffers have extra room, because buffers a multiple of 4 KiB apart conflict in the processor. */
    _Alignas(64) double grad_buffer[FSDPC_OPTIM_TILE + 16];
    _Alignas(64) float buffers[1 + FSDPC_OPTIM_STATES][FSDPC_OPTIM_TILE + 112];
    const fsdpc_optim_loops *loops = pass->loops;
    const fsdpc_optim_rules *rules = rules_of(loops, tensor);
    const int held = pass->rule->kind == FSDPC_OPTIM_MINI ? 1 : FSDPC_OPTIM_STATES;
    void *states[FSDPC_OPTIM_STATES] = {NULL, NULL, NULL};
    void *p = fsdpc_optim_load(loops, tensor->param, tensor->param_type, begin, n, buffers[0]);
    const void *g = fsdpc_optim_gradient(loops, pass->rule, tensor, begin, n, p, true, grad_buffer);
    for (int s = 0; s < held && tensor->states[s] != NULL; s++) {
        states[s] = fsdpc_optim_load(loops, tensor->states[s], tensor->state_type, begin, n,
                                     buffers[1 + s]);
    }
    switch (pass->rule->kind) {
    case FSDPC_OPTIM_ADAM:
        rules->adam(k, n, p, g, states[0], states[1], states[2]);
        break;
    case FSDPC_OPTIM_SGD:
        rules->sgd(k, n, p, g, states[0]);
        break;
    case FSDPC_OPTIM_LION:
        rules->lion(k, n, p, g, states[0]);
        break;
    case FSDPC_OPTIM_MINI:
        mini_blocks(rules, tensor, k, begin, n, p, g, states[0]);
        break;
    }
    fsdpc_optim_store(loops, tensor->param, tensor->param_type, begin, n, p);
    for (int s = 0; s < held && states[s] != NULL; s++) {
        fsdpc_optim_store(loops, tensor->states[s], tensor->state_type, begin, n, states[s]);
    }
}

/* True if the loops can read the gradients directly from memory. */
static bool
gradient_is_plain(const fsdpc_optim_rule *rule)
{
    return (rule->grad_scale == 1 || folds_scale(rule)) && !decays_gradients(rule);
}

/* Steps a tile by Adam with bfloat16 states that are rounded stochastically. */
static void
step_tile_stochastic(const struct pass *pass, const fsdpc_optim_tensor *tensor,
                     const fsdpc_optim_numbers *k, int64_t begin, int64_t n)
{
    _Alignas(64) float grad_buffer[FSDPC_OPTIM_TILE], buffer[FSDPC_OPTIM_TILE];
    const fsdpc_optim_loops *loops = pass->loops;
    const bool low_p = tensor->param_type == FSDPC_BF16;
    const bool low_g = tensor->grad_type == FSDPC_BF16 && gradient_is_plain(pass->rule);
    const uint64_t index = (uint64_t)(tensor->first + begin);
    float *values = NULL;
    const void *g = at(tensor->grad, tensor->grad_type, begin);
    if (!low_p || decays_gradients(pass->rule)) {
        values = fsdpc_optim_load(loops, tensor->param, tensor->param_type, begin, n, buffer);
    }
    if (!low_g) {
        g = fsdpc_optim_gradient(loops, pass->rule, tensor, begin, n, values, true, grad_buffer);
    }
    void *p = low_p ? at(tensor->param, FSDPC_BF16, begin) : values;
    loops->adam_stochastic(k, n, p, low_p, g, low_g, at(tensor->states[0], FSDPC_BF16, begin),
                           at(tensor->states[1], FSDPC_BF16, begin),
                           random_key(pass->rule, tensor, index), (uint32_t)index);
    if (!low_p) {
        fsdpc_optim_store(loops, tensor->param, tensor->param_type, begin, n, values);
    }
}

/* True if the loop adam_nearest can make the step: Adam, and all memory is bfloat16. */
static bool
is_low(const struct pass *pass, const fsdpc_optim_tensor *tensor, const fsdpc_optim_numbers *k)
{
    return pass->rule->kind == FSDPC_OPTIM_ADAM && tensor->param_type == FSDPC_BF16 &&
           tensor->grad_type == FSDPC_BF16 && tensor->state_type == FSDPC_BF16 &&
           tensor->states[2] == NULL && (float)k->weight1 < 0.5f && gradient_is_plain(pass->rule);
}

static void
step_tile_low(const struct pass *pass, const fsdpc_optim_tensor *tensor,
              const fsdpc_optim_numbers *k, int64_t begin, int64_t n)
{
    pass->loops->adam_nearest(
        k, n, at(tensor->param, FSDPC_BF16, begin), at(tensor->grad, FSDPC_BF16, begin),
        at(tensor->states[0], FSDPC_BF16, begin), at(tensor->states[1], FSDPC_BF16, begin));
}

static bool
is_one_of(fsdpc_dtype type, fsdpc_dtype a, fsdpc_dtype b)
{
    return type == a || type == b;
}

/* Returns the length of the longest tile: a whole part if loops use all memory in place, as a tile costs as
 * much time as 100 elements. A tile with a copy or an average is read again, so it must fit in a cache. */
static int64_t
longest_tile(const struct pass *pass, const fsdpc_optim_tensor *tensor, bool low)
{
    const fsdpc_dtype type = pass->rule->stochastic ? FSDPC_BF16 : FSDPC_F64;
    const bool in_place =
        low || (is_one_of(tensor->param_type, FSDPC_F32, type) &&
                is_one_of(tensor->grad_type, FSDPC_F32, type) &&
                is_one_of(tensor->state_type, FSDPC_F32, type) && gradient_is_plain(pass->rule));
    if (!in_place) {
        return FSDPC_OPTIM_TILE;
    }
    const bool read_again =
        tensor->copy != NULL || (pass->rule->averages && tensor->average != NULL);
    return read_again ? READ_AGAIN_TILE : FSDPC_OPTIM_PART;
}

/* Ends a tile where the high half of the index changes, because random_key gives one key for a whole tile. */
static int64_t
tile_length(const fsdpc_optim_tensor *tensor, int64_t tile, int64_t end, int64_t longest)
{
    const int64_t half = (int64_t)1 << 32;
    int64_t most = half - (tensor->first + tile) % half;
    most = most < longest ? most : longest;
    return end - tile < most ? end - tile : most;
}

/* Prefetches the first lines of the tensor that is stepped next, because a processor detects a stream only by
 * its first lines, and a small tensor has few other lines. */
static void
prefetch_first_lines(const fsdpc_optim_tensor *tensor)
{
    const void *memory[] = {tensor->param, tensor->grad, tensor->states[0], tensor->states[1]};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        for (uintptr_t line = 0; line < FIRST_LINES; line++) {
            __builtin_prefetch((const void *)((uintptr_t)memory[i] + line * FSDPC_OPTIM_LINE));
        }
    }
}

static void
step_any_tile(const struct pass *pass, int index, bool low, int64_t begin, int64_t n)
{
    const fsdpc_optim_tensor *tensor = &pass->tensors[index];
    const fsdpc_optim_numbers *k = &pass->numbers[index];
    if (pass->rule->stochastic) {
        step_tile_stochastic(pass, tensor, k, begin, n);
    } else if (low) {
        step_tile_low(pass, tensor, k, begin, n);
    } else {
        step_tile(pass, tensor, k, begin, n);
    }
    if (tensor->copy != NULL) {
        fsdpc_optim_store(pass->loops, tensor->copy, tensor->copy_type, begin, n,
                          at(tensor->param, FSDPC_F32, begin));
    }
    fsdpc_optim_average_tile(pass->loops, pass->rule, tensor, begin, n);
}

static void
measured_tile(const struct pass *pass, int index, bool low, int64_t begin, int64_t n)
{
    _Alignas(64) double old[FSDPC_OPTIM_MEASURED_TILE];
    const fsdpc_optim_tensor *tensor = &pass->tensors[index];
    fsdpc_optim_before_tile(&pass->meter, tensor, index, begin, n, old);
    step_any_tile(pass, index, low, begin, n);
    fsdpc_optim_behind_tile(&pass->meter, tensor, index, begin, n, old);
}

static void
step_part(void *context, int index, int64_t begin, int64_t end)
{
    const struct pass *pass = context;
    const fsdpc_optim_tensor *tensor = &pass->tensors[index];
    if (end == tensor->numel && index + 1 < pass->count) {
        prefetch_first_lines(tensor + 1);
    }
    const bool measured = pass->meter.values != NULL && tensor->measures != NULL;
    const bool low = !pass->rule->stochastic && is_low(pass, tensor, &pass->numbers[index]);
    int64_t longest = longest_tile(pass, tensor, low);
    if (measured && longest > FSDPC_OPTIM_MEASURED_TILE) {
        longest = FSDPC_OPTIM_MEASURED_TILE;
    }
    for (int64_t tile = begin, n; tile < end; tile += n) {
        n = tile_length(tensor, tile, end, longest);
        (measured ? measured_tile : step_any_tile)(pass, index, low, tile, n);
    }
}

int
fsdpc_optim_check(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor, int position)
{
    const fsdpc_dtype types[] = {tensor->param_type, tensor->grad_type, tensor->state_type};
    int doubles = 0;
    for (int i = 0; i < 3; i++) {
        if (!fsdpc_dtype_is_float(types[i])) {
            return fsdpc_error(FSDPC_E_TYPE, "tensor %d of the step is not of a float type",
                               position);
        }
        doubles += types[i] == FSDPC_F64;
    }
    if (doubles != 0 && doubles != 3) {
        return fsdpc_error(FSDPC_E_TYPE,
                           "tensor %d of the step: float64 cannot be mixed with other types "
                           "(parameter %s, gradient %s, states %s)",
                           position, fsdpc_dtype_name(types[0]), fsdpc_dtype_name(types[1]),
                           fsdpc_dtype_name(types[2]));
    }
    if (rule->stochastic && (rule->kind != FSDPC_OPTIM_ADAM || tensor->states[2] != NULL ||
                             tensor->state_type != FSDPC_BF16)) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "tensor %d of the step: stochastic rounding is for Adam with two "
                           "bfloat16 states",
                           position);
    }
    if (tensor->copy != NULL &&
        (tensor->param_type != FSDPC_F32 ||
         (tensor->copy_type != FSDPC_BF16 && tensor->copy_type != FSDPC_F16))) {
        return fsdpc_error(FSDPC_E_TYPE,
                           "tensor %d of the step: a copy in %s of a parameter in %s: copies are "
                           "bfloat16 or float16, of float32 parameters",
                           position, fsdpc_dtype_name(tensor->copy_type),
                           fsdpc_dtype_name(tensor->param_type));
    }
    return FSDPC_OK;
}

/* Computes each tensor's numbers, but reuses those of the tensor before if both are at the same step. */
static void
fill_numbers(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
             fsdpc_optim_numbers *numbers)
{
    for (int i = 0; i < count; i++) {
        if (i > 0 && tensors[i].step == tensors[i - 1].step) {
            numbers[i] = numbers[i - 1];
            continue;
        }
        numbers[i] = fsdpc_optim_numbers_of(rule, &tensors[i]);
        if (rule->stochastic) {
            fsdpc_optim_make_quick(&numbers[i]);
        }
    }
}

int
fsdpc_optim_step(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                 int threads)
{
    struct pass pass = {.rule = rule, .tensors = tensors, .count = count};
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(fsdpc_optim_check(rule, &tensors[i], i));
    }
    FSDPC_TRY(fsdpc_optim_select(&pass.loops));
    pass.numbers = fsdpc_mem_calloc((size_t)count, sizeof *pass.numbers);
    if (pass.numbers == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a step of %d tensors", count);
    }
    fill_numbers(rule, tensors, count, pass.numbers);
    int status = fsdpc_optim_meter_open(&pass.meter, tensors, count);
    if (status == FSDPC_OK) {
        status = fsdpc_optim_for_parts(tensors, count, threads, step_part, &pass);
        fsdpc_optim_meter_close(&pass.meter, tensors, count);
    }
    fsdpc_mem_free(pass.numbers);
    return status;
}
