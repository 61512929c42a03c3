"""The tests of several ranks that are skipped on the simulated GPU, each with the reason."""

from __future__ import annotations

UNEVEN = "ranks gather together over NCCL: that some evaluate longer is for shared memory only"
UNMARKED = "ranks that run different units without mark_data_dependent: refused by name on a GPU"

# A key is the path of a file below tests/. If "::" and a text follow the path, only the tests of
# that file whose names begin with the text are skipped.
SKIPPED: dict[str, str] = {
    "dist/test_comm.py": "shared memory of a host, tested as such",
    "dist/test_harness.py": "the harness itself",
    "dist/test_hosts.py": "groups of several hosts on CPU ranks",
    "parity/test_product.py::test_hosts_of_several_ranks": "groups of several hosts on CPU ranks",
    "dist/test_quantized_reduce.py::test_sums_are_those_of": "groups of several hosts on CPU ranks",
    "dist/test_quantized.py::test_bytes": "a wire among CPU ranks",
    "dist/test_quantized_reduce.py::test_where_nothing": "groups of several hosts on CPU ranks",
    "dist/test_memory.py": "figures of shared memory, and the simulator's own growth",
    "dist/test_state_memory.py": "figures of the process, where the simulated GPU keeps its memory",
    "dist/test_eval_uneven.py": UNEVEN,
    "dist/test_fully_shard.py::test_sums_in_low_precision": "NCCL rounds each partial sum",
    "dist/test_features_graph.py::test_ranks_evaluate_different_numbers_of_batches": UNEVEN,
    "dist/test_features_experts.py": UNMARKED + "; parity/test_runs.py marks them",
    "dist/test_optim_in_backward.py": "refused by name for units on a GPU: test_device_optim.py",
    "dist/test_optim_offload.py": "states on a disk are refused by name for units on a GPU",
    "dist/test_with_collectives.py": "collectives of host memory, and fake process groups",
    "dist/test_hooks_comm.py::test_in_a_fake_process_group": "a process group without ranks",
    "dist/test_hooks_comm.py::test_units_that_run_by_data": UNMARKED,
    "dist/test_hooks_comm.py::test_sums_in_half": "NCCL rounds each partial sum",
    "dist/test_hooks_comm.py::test_a_gather_that_meets": "the comparison names ranks only",
    "dist/test_hooks_comm.py::test_a_rank_that_does_not": "the next comparison waits, not the hook",
    "dist/test_with_optimizer_in_backward.py::test_units_that_some_ranks_ran": UNMARKED,
    "conformance/test_conform_training.py::test_fsdpc[ranks_that_use_different_units": UNMARKED,
}

# In these test modules, torch's operators are not watched (watch.py), because torch.compile does
# not compile a program whose operators are watched.
UNWATCHED = {"test_with_compile"}


def reason_to_skip(file: str, test: str) -> str | None:
    for place, reason in SKIPPED.items():
        path, _, name = place.partition("::")
        if path == file and test.startswith(name):
            return reason
    return None
