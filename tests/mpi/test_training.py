"""What training is made of, at any number of ranks."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep import World
from lockstep.data import Images, batches, mnist
from lockstep.data.digits import digits as as_digits
from lockstep.data.load import load
from lockstep.errors import DataError, SettingsError
from lockstep.journal import Journal
from lockstep.metrics import RunDirectory
from lockstep.models import ConvNet
from lockstep.proof import joint_loss, proofs
from lockstep.settings import Classic
from lockstep.sgd import SynchronousSGD
from lockstep.together import on_all
from lockstep.training import evaluate, lay_out


def digits(n: int) -> Images:
    """Return the same noise on all ranks."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return as_digits(images, torch.randint(10, (n,), generator=generator))


@pytest.fixture
def shared(tmp_path: Path, comm: MPI.Intracomm) -> Path:
    """Return one directory for all ranks."""
    return comm.bcast(tmp_path, root=0)


def test_convnet() -> None:
    """21,840 parameters; ten probabilities an image; no image is a batch too."""
    model = ConvNet()
    assert sum(p.numel() for p in model.parameters()) == 21_840
    output = model(torch.rand(3, 1, 28, 28))
    torch.testing.assert_close(output.exp().sum(dim=1), torch.ones(3))
    assert model(torch.rand(0, 1, 28, 28)).shape == (0, 10)


@pytest.mark.parametrize("n", [1, 2, 101])
def test_every_test_image_counts_once(world: World, n: int) -> None:
    """The test over all ranks is that of one process, and the same on all ranks."""
    images = digits(n)
    torch.manual_seed(1)
    model = ConvNet()
    score = evaluate(model, images, 7, world)
    assert model.training
    x, y = images.batch(slice(None))
    output = model.eval()(x)
    assert score.total == n
    assert score.correct == int((output.argmax(dim=1) == y).sum())
    assert score.loss == pytest.approx(F.nll_loss(output, y).item(), rel=1e-5)


def test_every_image_of_the_sample_counts_once(world: World) -> None:
    """The thousand held-out digits, however many ranks."""
    _, held_out = load(world, "sample", Path("unused"))
    assert evaluate(ConvNet(), held_out, 64, world).total == 1000


def joined(model: nn.Module, images: Images, world: World) -> nn.Module:
    """Train on the joined batches, in one process."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for batch in batches(len(images), 4, world, 1, 1):
        x, y = images.batch(batch.joined)
        sgd.zero_grad()
        F.nll_loss(model(x.double()), y).backward()
        sgd.step()
    return model


@pytest.mark.parametrize("way", ["by hand", "DDP"])
def test_short_and_empty_batches_are_exact(world: World, way: str) -> None:
    """Two full batches and one that has no image for some ranks: the steps of one process."""
    images = digits(8 * world.size + max(1, world.size - 1))
    torch.manual_seed(2)
    model = ConvNet().double().eval()
    torch.manual_seed(2)
    alone = joined(ConvNet().double().eval(), images, world)
    if way == "DDP":
        network: nn.Module = DistributedDataParallel(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    else:
        sgd = SynchronousSGD(model, world, lr=0.1, momentum=0.5)
    for batch in batches(len(images), 4, world, 1, 1):
        x, y = images.batch(batch.indices)
        if way == "DDP":
            plain.zero_grad()
            joint_loss(network(x.double()), y, batch.total, world.size).backward()
            plain.step()
        else:
            sgd.zero_grad()
            if len(y):
                sgd.backward(F.nll_loss(model(x.double()), y), examples=len(y))
                sgd.step()
            else:
                sgd.step(examples=0)
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_proofs(world: World) -> None:
    """Three ways to take the first steps agree; weights that differ are found."""
    settings = Classic(verify=3, batch_size=5)
    images = digits(40)
    torch.manual_seed(3)
    model = ConvNet()
    found = proofs(model, model, images, settings, world)
    assert len(found) == 4
    assert found.pop("divergence between ranks") == 0.0
    assert all(value < 1e-12 for value in found.values())
    with torch.no_grad():
        next(model.parameters()).add_(0.5 * world.rank)
    apart = proofs(model, model, images, Classic(), world)["divergence between ranks"]
    assert apart == pytest.approx(0.5 * (world.size - 1))


def test_memory_format_is_the_same_on_all_ranks(world: World, comm: MPI.Intracomm) -> None:
    """Whichever is faster; and what was asked for is obeyed."""
    cpu = torch.device("cpu")
    _, layout, facts = lay_out(ConvNet(), Classic(batch_size=4), cpu)
    assert len(set(comm.allgather(str(layout)))) == 1
    assert facts["channels_last_is_faster_by"] > 0
    model, layout, _ = lay_out(ConvNet(), Classic(channels_last="on"), cpu)
    assert layout == torch.channels_last
    assert isinstance(model, ConvNet)
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert lay_out(ConvNet(), Classic(channels_last="off"), cpu)[1] == torch.contiguous_format


def test_what_fails_on_one_rank_fails_on_all(world: World) -> None:
    """The same error, which names the rank if the others had none."""
    last = world.size - 1

    def action() -> int:
        if world.rank == last:
            raise DataError("no such file", needed="it", cure="get it")
        return world.rank

    with pytest.raises(DataError, match="no such file") as caught:
        on_all(world, action, "try")
    assert (f"rank {last} (" in str(caught.value)) == (world.size > 1)
    assert on_all(world, lambda: world.rank, "try") == world.rank


@pytest.mark.ranks(2)
def test_mnist_is_broken_for_one_rank(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that only the root has, and no network: one error on all ranks."""

    def refuse(directory: Path, limit: float) -> None:
        raise DataError(f"MNIST cannot be downloaded to {directory}")

    monkeypatch.setattr(mnist, "fetch", refuse)
    with pytest.raises(DataError, match=r"rank 0 \(.*cannot be downloaded"):
        load(world, "mnist", shared)


def test_of_several_that_find_no_file_one_downloads(
    world: World, shared: Path, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks fetch at once, as the nodes do that share a directory: there is a lock."""

    def download(raw: Path, names: list[str]) -> None:
        with (raw / "log").open("a") as log:
            log.write(f"{world.rank}\n")
        for name in names:
            (raw / name).write_text("")

    monkeypatch.setattr(mnist, "_download", download)
    comm.barrier()
    mnist.fetch(shared, 30.0)
    comm.barrier()
    assert len((shared / "MNIST" / "raw" / "log").read_text().splitlines()) == 1


@pytest.mark.ranks(2)
def test_a_lock_that_is_never_given_back(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """The wait for another process that downloads has a limit."""
    raw = shared / "MNIST" / "raw"
    if world.rank == 0:
        raw.mkdir(parents=True)
        with (raw / ".lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            comm.barrier()
            comm.barrier()
        return
    comm.barrier()
    try:
        with pytest.raises(DataError, match="another process has held"):
            mnist.fetch(shared, 0.3)
    finally:
        comm.barrier()


@dataclass(frozen=True)
class Small(Classic):
    """Settings of a job."""


def test_run_directory(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """The root writes it; a second run at the same second gets another one."""
    first = RunDirectory(world, shared / "runs", "job", Small(), {"fact": 1})
    second = RunDirectory(world, shared / "runs", "job", Small(), {})
    assert first.path != second.path
    assert len(set(comm.allgather(first.path))) == 1
    first.record("step", loss=1.0)
    for epoch in (1, 2):
        first.record("epoch", epoch=epoch, train_loss=1.0, test_loss=0.5, accuracy=90.0)
    first.finish()
    comm.barrier()
    names = {"settings.json", "metrics.jsonl", "results.csv", "curves.png", "DONE"}
    assert {path.name for path in first.path.iterdir()} == names
    assert {path.name for path in second.path.iterdir()} == {"settings.json"}
    noted = json.loads((first.path / "settings.json").read_text())
    assert noted["settings"]["batch_size"] == 64
    assert (noted["fact"], noted["ranks"], len(noted["hosts"])) == (1, world.size, world.size)
    lines = [json.loads(line) for line in (first.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "epoch", "epoch"]
    assert len((first.path / "results.csv").read_text().splitlines()) == 3


def test_run_directory_cannot_be_made(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """The same error on all ranks, though only the root has tried."""
    if world.rank == 0:
        (shared / "file").write_text("")
    comm.barrier()
    with pytest.raises(SettingsError, match="--run-dir"):
        RunDirectory(world, shared / "file", "job", Small(), {})


def test_journal(world: World, shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The lines of the classic script, printed by the root alone; the loss is that of all ranks."""
    settings = Small(run_dir=shared, group_name="label", batch_size=5, log_interval=1)
    journal = Journal("job", settings, world, 10 * world.size)
    images = digits(10 * world.size)
    journal.start_epoch()
    for number, batch in enumerate(batches(len(images), 5, world, 1, 1)):
        journal.step(1, number, batch, torch.tensor(1.0 + world.rank))
    journal.epoch(1, lambda: evaluate(ConvNet(), images, 4, world), waited=0.0)
    journal.end({"divergence between ranks": 0.0})
    dist.barrier()
    text = capfd.readouterr().out
    if world.rank:
        assert text == ""
    else:
        assert f"Train Epoch: 1 [{5 * world.size}/{10 * world.size} (50%)]\tLoss: 1.000000" in text
        assert f"/{10 * world.size} (" in text
        assert "divergence between ranks 0.0" in text.splitlines()
    run = next(shared.glob("job-label-*"))
    row = (run / "results.csv").read_text().splitlines()[1].split(",")
    assert float(row[1]) == pytest.approx(1 + (world.size - 1) / 2)
