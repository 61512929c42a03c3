/* Steps of tensors in a device's memory: kernels of the device apply the rules of optim.h. */
#include "optim/optim_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "device/device.h"

static fsdpc_step_kind
kind_of(const fsdpc_optim_rule *rule, fsdpc_optim_states how)
{
    if (how != FSDPC_OPTIM_WHOLE) {
        return how == FSDPC_OPTIM_EDGES8 ? FSDPC_STEP_EDGES8 : FSDPC_STEP_ADAM8;
    }
    return rule->stochastic ? FSDPC_STEP_STOCHASTIC : (fsdpc_step_kind)rule->kind;
}

static fsdpc_step_rule
rule_of(const fsdpc_optim_rule *rule, fsdpc_optim_states how)
{
    return (fsdpc_step_rule){.lr = rule->lr,
                             .beta1 = rule->beta1,
                             .beta2 = rule->beta2,
                             .eps = rule->eps,
                             .weight_decay = rule->weight_decay,
                             .grad_scale = rule->grad_scale,
                             .clip = rule->clip,
                             .seed = rule->seed,
                             .kind = (int32_t)kind_of(rule, how),
                             .decoupled = rule->decoupled,
                             .maximize = rule->maximize,
                             .nesterov = rule->nesterov,
                             .keeps_grads = rule->keeps_grads};
}

static fsdpc_step_tensor
tensor_of(const fsdpc_optim_tensor *tensor, float *step)
{
    return (fsdpc_step_tensor){
        .param = tensor->param,
        .grad = tensor->grad,
        .states = {tensor->states[0], tensor->states[1], tensor->states[2]},
        .scales = {tensor->scales[0], tensor->scales[1]},
        .edges = tensor->edges,
        .step = step,
        .n = tensor->numel,
        .first = tensor->first,
        .block = tensor->block,
        .key = tensor->key,
        .param_type = (int16_t)tensor->param_type,
        .grad_type = (int16_t)tensor->grad_type,
        .state_type = (int16_t)tensor->state_type,
    };
}

static int
check(const fsdpc_optim_rule *rule, fsdpc_optim_states how, const fsdpc_optim_tensor *tensors,
      int count)
{
    for (int i = 0; i < count; i++) {
        if (how != FSDPC_OPTIM_WHOLE) {
            FSDPC_TRY(fsdpc_optim_check8(&tensors[i], i));
        } else {
            FSDPC_TRY(fsdpc_optim_check(rule, &tensors[i], i));
        }
    }
    return FSDPC_OK;
}

int
fsdpc_optim_step_on(fsdpc_device *device, const fsdpc_optim_rule *rule, fsdpc_optim_states how,
                    const fsdpc_step_control *control, const fsdpc_optim_tensor *tensors,
                    float *const *steps, int count, void *scratch)
{
    fsdpc_step_codes codes[2];
    memset(codes, 0, sizeof codes);
    FSDPC_TRY(check(rule, how, tensors, count));
    fsdpc_step_tensor *list = fsdpc_mem_calloc((size_t)count, sizeof *list);
    if (!list) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a step of %d tensors", count);
    }
    for (int i = 0; i < count; i++) {
        list[i] = tensor_of(&tensors[i], steps[i]);
    }
    for (int which = 0; which < 2 && how != FSDPC_OPTIM_WHOLE; which++) {
        fsdpc_optim_map_of(which, &codes[which]);
    }
    const fsdpc_steps call = {.rule = rule_of(rule, how),
                              .control = *control,
                              .tensors = list,
                              .count = count,
                              .codes = codes,
                              .scratch = scratch};
    const int status = fsdpc_device_step(device, &call);
    fsdpc_mem_free(list);
    return status;
}
