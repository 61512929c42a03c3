"""Tests of fsdpc.checkpoint on URLs, through drivers of fsspec.

The tests cover uploads that succeed or leave no checkpoint, reads of byte ranges, and folders of
steps. Most tests use a driver of local files whose uploads can fail or be slow. The test that kills
ranks uses an S3 server, as benchmarks/bench_storage.py does. `FSDPC_TEST_KILLS=50` sets the number
of kills to 50.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoints import build, mixed, same, whole
from fsspec.implementations.local import LocalFileSystem
from harness import die, ranks, run_ranks
from torch import nn
from toys import loss_of, tokens

from fsdpc import checkpoint
from fsdpc.__main__ import main as program
from fsdpc.checkpoint import CheckpointError, Url
from fsdpc.checkpoint.verify import verify

KILLS = int(os.environ.get("FSDPC_TEST_KILLS", "1"))


class Odd(LocalFileSystem):
    """A file system of local files under ``odd://`` that counts the bytes that are read.

    Its uploads can fail, wait or kill the process.
    """

    protocol = "odd"
    cachable = False
    uploads = 0
    fails_at = -1
    dies = False
    wait = 0.0
    read = 0

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("odd:/"))

    def put_file(self, *args, **options):
        Odd.uploads += 1
        time.sleep(Odd.wait)
        if Odd.uploads == Odd.fails_at:
            if Odd.dies:
                die()
            raise OSError("503 Slow Down")
        self.auto_mkdir = True
        super().put_file(*args, **options)

    def cat_file(self, path, start=None, end=None, **options):
        found = super().cat_file(path, start=start, end=end, **options)
        Odd.read += len(found)
        return found


fsspec.register_implementation("odd", Odd, clobber=True)


@pytest.fixture
def s3(monkeypatch):
    """Yield a function that starts moto's server with a bucket and returns the environment."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from bench_storage import server

    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, "")
    with contextlib.ExitStack() as stack:

        def start() -> dict[str, str]:
            stack.enter_context(server())
            return {name: os.environ[name] for name in names}

        yield start


def command(line: list[str]) -> int:
    return program(["checkpoint", *line])


def trained(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(seed + 1):
        loss_of(model, tokens(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_there(rank: int, world: int, path: str, kind: str) -> None:
    model, optimizer = trained(kind)
    checkpoint.save(f"odd:/{path}/a", model, optimizer, extra={"rank": rank}, file_bytes=500)
    checkpoint.save(f"{path}/b", model, optimizer, extra={"rank": rank}, file_bytes=500)
    checkpoint.save(f"odd:/{path}/m", {"one": model, "two": model}, staging=f"{path}/staging")
    assert rank or not any(Path(path, "staging").iterdir())


def load_there(rank: int, world: int, path: str, kind: str) -> None:
    there, here = trained(kind, 1), trained(kind, 1)
    Odd.read = 0
    found = checkpoint.load(f"odd:/{path}/a", *there, verify="no")
    assert not found.verified and str(found.path) == f"odd:/{path}/a"
    size = sum(file.stat().st_size for file in Path(path, "a").rglob("*") if file.is_file())
    headers = 4096 * len(list(Path(path, "a").rglob("*.safetensors")))
    if kind != "plain":
        assert Odd.read < 2 * headers + size / world + 30_000
    assert checkpoint.load(f"{path}/b", *here).verified
    same(there[0].state_dict(), whole(here[0].state_dict()))
    assert checkpoint.load(f"odd:/{path}/a", *there).verified
    checkpoint.load(f"odd:/{path}/m/two", there[0])
    checkpoint.load(f"odd:/{path}/m", {"one": there[0]})
    same(there[0].state_dict(), whole(here[0].state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdpc", "fsdp2"])
def test_uploads_load_at_any_number_of_ranks(tmp_path: Path, kind: str):
    run_ranks(save_there, 2, path=str(tmp_path), kind=kind)
    run_ranks(load_there, 3, path=str(tmp_path), kind=kind)
    run_ranks(load_there, 1, path=str(tmp_path), kind="plain")
    names = {str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*")}
    assert names == {str(p.relative_to(tmp_path / "b")) for p in (tmp_path / "b").rglob("*")}
    for name in names - {"fsdpc.json"}:  # fsdpc.json of a URL differs from that of a local folder
        if (tmp_path / "a" / name).is_file():
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def upload_fails(rank: int, world: int, path: str, at: int, dies: bool) -> str:
    model, optimizer = trained("fsdpc")
    if rank == 1:
        Odd.fails_at, Odd.dies = at, dies
    url = f"odd:/{path}/a"
    with pytest.raises(CheckpointError, match="rank 1") as error:
        checkpoint.save(url, model, optimizer, file_bytes=500, staging=path)
    assert not Path(path, "a", "fsdpc.json").exists()
    if dies:
        return str(error.value)
    with pytest.raises(CheckpointError, match=r"without its fsdpc.json"):
        checkpoint.load(url, model, optimizer)
    checkpoint.save(url, model, optimizer, file_bytes=500, staging=path)
    assert checkpoint.load(url, model, optimizer).verified
    with pytest.raises(CheckpointError, match="exists: choose another name"):
        checkpoint.save(url, model, staging=path)
    with pytest.raises(CheckpointError, match="cannot be replaced as a whole"):
        checkpoint.save(url, model, staging=path, overwrite=True)
    with pytest.raises(CheckpointError, match="needs a local folder"):
        checkpoint.save(url, model, format="dcp")
    assert rank or not [name for name in os.listdir(path) if name.startswith(".new")]
    return str(error.value)


@pytest.mark.parametrize("dies", [False, True])
def test_an_upload_that_fails_is_no_checkpoint(tmp_path: Path, dies: bool):
    arguments = {"path": str(tmp_path), "at": 2, "dies": dies}
    outcomes = run_ranks(upload_fails, 2, faults=True, **arguments)
    assert outcomes[0].returned and outcomes[1].returned == (not dies), outcomes
    if not dies:
        assert f"odd:/{tmp_path}/a" in outcomes[0].value and "503" in outcomes[0].value


def keep_steps(rank: int, world: int, path: str) -> None:
    model, optimizer = trained("fsdpc")
    url = f"odd:/{path}/run"
    keeper = checkpoint.Checkpointer(url, keep=2, best="min", async_=True, staging=path)
    for step, metric in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.4)):
        keeper.save(step, model, optimizer, metric=metric)
    keeper.wait()
    assert keeper.steps() == [2, 3, 4] and str(keeper.latest()) == f"{url}/step-000004"
    assert keeper.best() == Url(f"{url}/step-000002")
    if rank == 0:
        (Path(path) / "run" / "step-000009" / "fsdpc").mkdir(parents=True)
        (Path(path) / "run" / "step-000009" / "fsdpc" / "state.json").touch()
    again = checkpoint.Checkpointer(url, keep=2, staging=path)
    found = again.resume(model, optimizer)
    assert found is not None and found.step == 4 and found.verified
    found = again.resume(model, optimizer, step=3)
    assert found is not None and found.step == 3 and again.abandoned() == [4]
    again.save(5, model, optimizer)
    again.save(4, model, optimizer)
    assert (again.steps(), again.abandoned()) == ([3, 4], [])
    assert not (Path(path) / "run" / "step-000009").exists()
    Odd.fails_at = Odd.uploads + 2
    with pytest.raises(CheckpointError, match="503"):
        again.save(6, model, optimizer)
    assert again.latest() == Url(f"{url}/step-000004")
    assert again.resume(model, optimizer).step == 4


def test_steps_are_kept_found_and_gone_back_to(tmp_path: Path):
    run_ranks(keep_steps, 2, path=str(tmp_path))


def slow_saves(rank: int, world: int, path: str) -> list[str]:
    """Save three steps, while a thread of rank 1 verifies the checkpoints that it finds.

    Returns the outcomes on rank 1: "good", "damaged" or an error's text.
    """
    model, optimizer = trained("fsdpc")
    if rank < 2:
        Odd.wait = 0.02
    seen: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for folder in Path(path, "run").glob("step-*"):
                if (folder / "fsdpc.json").exists():
                    try:
                        seen.append("damaged" if verify(Url(f"odd:/{folder}")).damaged else "good")
                    except CheckpointError as error:
                        seen.append(str(error))

    watcher = threading.Thread(target=look)
    if rank == 1:
        watcher.start()
    keeper = checkpoint.Checkpointer(f"odd:/{path}/run", keep=None, staging=path)
    for step in range(3):
        keeper.save(step, model, optimizer)
    done.set()
    if rank == 1:
        watcher.join()
    return seen


def test_who_looks_meanwhile_sees_whole_checkpoints_only(tmp_path: Path):
    seen = run_ranks(slow_saves, 2, path=str(tmp_path))[1]
    assert seen and set(seen) == {"good"}


def test_one_process_damage_and_the_command(tmp_path: Path, capsys):
    model, url = mixed(1), "memory://bucket/a"
    checkpoint.save(url, model, dtype=torch.bfloat16)
    other = mixed(2)
    checkpoint.load(url, other, cast=True)
    assert torch.equal(other.mask, model.mask.bfloat16().float())
    for line in (["verify", url], ["inspect", url], ["diff", url, url]):
        assert command(line) == 0, capsys.readouterr()
    fs = fsspec.filesystem("memory")
    path = "/bucket/a/model-00001-of-00001.safetensors"
    content = bytearray(fs.cat_file(path))
    content[-3] ^= 1
    fs.pipe_file(path, bytes(content))
    assert command(["verify", url]) == 1
    with pytest.raises(CheckpointError, match="is damaged: the checksum of block"):
        checkpoint.load(url, other, cast=True)
    fs.pipe_file(path, bytes(content[:-10]))
    with pytest.raises(CheckpointError, match="is damaged: its size"):
        checkpoint.load(url, other, cast=True)
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.load("memory://bucket/b", other)
    with pytest.raises(CheckpointError, match=r"nosuch.*\(pip install fsspec"):
        checkpoint.load("nosuch://bucket/b", other)
    with pytest.raises(CheckpointError, match="needs a local folder"):
        checkpoint.load_pretrained(other, "memory://bucket/a")
    folder = Path("file:") / str(tmp_path)[1:] / "c"
    checkpoint.save(f"file://{tmp_path}/c", model)
    assert (tmp_path / "c" / "fsdpc.json").exists() and not folder.exists()


def save_until_killed(rank: int, world: int, url: str, path: str, victim: int, after: float):
    """Save until rank ``victim`` is killed.

    Before each save, all elements of the model are set to the number of the save. Every second save
    replaces the checkpoint of the save before it.
    """
    model = build("fsdp2")
    keeper = checkpoint.Checkpointer(url, keep=2, keep_every=5, staging=path)
    found = keeper.resume(model)
    number = 0 if found is None else found.extra["number"]
    first = number
    while True:
        number += 1
        if rank == victim and number == first + 2:
            threading.Timer(after, die).start()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(number)
        keeper.save(number // 2, model, extra={"number": number})


def seen_until(url: str, done: threading.Event, kept: list[int]) -> None:
    """Read the latest checkpoint again and again, and count the outcomes in ``kept``.

    The three counts are of whole checkpoints, of checkpoints that were replaced during the read,
    and of broken checkpoints.
    """
    keeper = checkpoint.Checkpointer(url)
    while not done.wait(0.02):
        path = keeper.latest()
        if path is None:
            continue
        try:
            text = (path / "fsdpc.json").read_bytes()
            is_whole = not verify(path).damaged
        except (CheckpointError, FileNotFoundError):
            is_whole = False
        try:
            still = (path / "fsdpc.json").read_bytes() == text
        except FileNotFoundError:
            still = False
        kept[0 if is_whole else 2 if still else 1] += 1


@pytest.mark.long
def test_killed_ranks_leave_whole_checkpoints_in_object_storage(
    tmp_path: Path, s3: Callable[[], dict[str, str]]
):
    url, rng = "s3://weights/run", random.Random(os.environ.get("FUZZ_SEED", "1"))
    environment, done, seen = s3(), threading.Event(), [0, 0, 0]
    looker = threading.Thread(target=seen_until, args=(url, done, seen))
    looker.start()
    before = 0
    for _ in range(KILLS):
        victim, after = rng.randrange(2), rng.uniform(0, 1)
        arguments = {"url": url, "path": str(tmp_path), "victim": victim, "after": after}
        outcomes = run_ranks(save_until_killed, 2, faults=True, env=environment, **arguments)
        assert outcomes[victim].exit_signal == signal.SIGKILL, outcomes[victim].error
        survivor = outcomes[1 - victim]
        assert survivor.error_types[:1] == ("CheckpointError",), survivor.error
        model = build("plain")
        found = checkpoint.Checkpointer(url).resume(model)
        assert found is not None
        number = found.extras[0]["number"]
        values = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
        assert values == {number} and found.step == number // 2, (values, number)
        assert number >= before - 1  # a killed save may lose the checkpoint that it was replacing
        before = number
    done.set()
    looker.join()
    assert seen[0] and not seen[2], seen
    if KILLS > 1:
        print(f"{KILLS} kills, saves: {before}, whole, replaced, others: {seen}")


@ranks(2)
def test_storage_that_does_not_serve_is_named(rank, world):
    with pytest.raises(
        CheckpointError, match="memory of each process alone, and 2 ranks save there"
    ):
        checkpoint.save("memory://bucket/a", build("fsdpc"))
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(CheckpointError, match=r"s3://bucket/a: .*pip install s3fs"):
            checkpoint.save("s3://bucket/a", build("fsdpc"))
