"""Programs whose ranks are on several hosts, and what becomes of them when a host or a link fails."""

from __future__ import annotations

import inspect

import on_hosts
import pytest
from harness import run_ranks

import test_by_rows
import test_features_experts
