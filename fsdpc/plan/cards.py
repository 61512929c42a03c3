"""Accelerators by name: usable bytes, speeds and links, each with its source.

``usable``: bytes that the driver offers; a vendor's "80 GB" is neither 80e9 nor 80 * 2**30 bytes.
``bandwidth``: bytes per second of the card's memory.
``flops``: FLOPs per second of dense bf16 products (fp16 on V100 and T4) with fp32 accumulation.
``link``: bytes per second in one direction between two GPUs of a host. ``host``: the same between a
GPU and its host. ``network``: bytes per second of the host's network interfaces, divided by
the number of its GPUs (A10, L4, T4 and V100: on the largest hosts that AWS lists with such cards;
consumer cards: one interface of 25 Gbit/s per host is assumed). ``like``: the card from whose
published runs the fraction of peak FLOPs is taken.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    name: str
    usable: int
    bandwidth: float
    flops: float
    link: float
    host: float
    source: str
    network: float = 50e9  # one 400 Gbit/s interface per GPU
    like: str = "a100"
    reached: float = 0.8  # the fraction of the network's rate that runs reach
    latency: float = 10e-6  # seconds of a ring step between hosts


def _card(
    name: str,
    gib: float,
    tb: float,
    tflops: float,
    link: float,
    host: float,
    source: str,
    **more: float | str,
) -> Card:
    return Card(
        name, int(gib * GIB), tb * 1e12, tflops * 1e12, link * 1e9, host * 1e9, source, **more
    )  # type: ignore[arg-type]


_SHEET = "vendor's data sheet"
_ESTIMATED = _SHEET + "; usable bytes estimated"
_MODAL = "usable bytes as Modal's GPU glossary lists them; speeds from the vendor's data sheet"
_NVL = "95,830 MiB shown by the driver; " + _SHEET
_TORCH = " GiB shown by torch; " + _SHEET
_AWS, _ONE = 12.5e9 / 8, 3.125e9 / 8  # ``network`` of cards on AWS's hosts; of consumer cards
CARDS = {
    c.name: c
    for c in (
        _card("h100", 79.65, 3.35, 989, 450, 50, _MODAL, like="h100"),
        _card("h100-nvl", 93.58, 3.9, 835, 300, 50, _NVL, like="h100"),
        _card("h200", 140.4, 4.8, 989, 450, 50, _MODAL, like="h100"),
        _card("b200", 179.0, 8.0, 2250, 900, 60, _ESTIMATED, like="h100"),
        _card("a100-80", 79.15, 2.04, 312, 300, 25, "79.15" + _TORCH, network=25e9),
        _card("a100-40", 39.4, 1.555, 312, 300, 25, "39.4" + _TORCH, network=25e9),
        _card("l40s", 44.99, 0.864, 362, 25, 25, _MODAL, network=50e9 / 8),
        _card("a10", 22.5, 0.6, 125, 25, 25, _MODAL, network=_AWS),
        _card("l4", 22.5, 0.3, 121, 25, 25, _MODAL, network=_AWS),
        _card("t4", 15.0, 0.32, 65, 12, 12, _MODAL, network=_AWS),
        _card("v100-32", 31.7, 0.9, 125, 150, 12, _ESTIMATED, network=_AWS),
        _card("rtx3090", 23.6, 0.936, 71, 25, 25, _ESTIMATED, network=_ONE),
        _card("rtx4090", 23.6, 1.008, 165, 25, 25, _ESTIMATED, network=_ONE),
        _card("mi300x", 191.5, 5.3, 1307, 448, 50, _ESTIMATED, like="h100"),
    )
}


def card(name: str) -> Card:
    """The card of this name. ``ValueError`` lists the known names."""
    found = CARDS.get(name.lower())
    if found is None:
        raise ValueError(f"unknown GPU {name!r}: use one of {', '.join(CARDS)}, or --memory")
    return found


def size(count: float) -> str:
    """Return ``count`` bytes as a text in GiB, or in a smaller unit below 0.1 GiB."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= 0.1 * scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:.0f} B"


def _scaled(text: str, scales: dict[str, float], like: str) -> float:
    """Return the number in ``text`` times the scale of its unit. ``ArgumentTypeError``: ``text`` is
    not a positive number with one of the units.
    """
    lower = text.strip().lower().removesuffix("/s")
    unit = next((unit for unit in scales if lower.endswith(unit)), None)
    try:
        found = float(lower.removesuffix(unit)) * scales[unit] if unit else 0.0
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not like {like}")
    return found


def bit_rate_of(text: str) -> float:
    """Return a rate such as ``10Gbit`` in bytes per second. ``ArgumentTypeError``: not a rate."""
    return _scaled(text, {"gbit": 1e9 / 8, "mbit": 1e6 / 8}, "10Gbit or 947Mbit")


def seconds_of(text: str) -> float:
    """Return a time such as ``0.2ms`` or ``50us`` in seconds. ``ArgumentTypeError``: not a time."""
    return _scaled(text, {"ms": 1e-3, "us": 1e-6, "s": 1.0}, "0.2ms or 50us")


def counted(count: int, what: str) -> str:
    """A count with its noun: ``1 unit``, ``2 units``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def bytes_of(text: str, least: int = 1 << 20) -> int:
    """Return the bytes of a size such as ``24GB`` (1e9), ``22.5GiB`` (2**30) or ``25769803776``.
    ``ArgumentTypeError``: ``text`` is not a size, or is less than ``least`` bytes, which suggests
    that the unit is missing.
    """
    lower = text.strip().lower()
    scales = {"gib": GIB, "mib": 1 << 20, "tb": 10**12, "gb": 10**9, "mb": 10**6, "g": 10**9}
    unit = next((unit for unit in scales if lower.endswith(unit)), "")
    try:
        found = int(float(lower.removesuffix(unit).removesuffix("b")) * scales.get(unit, 1))
    except (ValueError, OverflowError):
        found = -1
    if found < least:
        raise ArgumentTypeError(f"{text!r} is no size such as 24GB or 22.5GiB")
    return found
