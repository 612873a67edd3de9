"""Marks of tests that need the emulator."""

import pytest

from .tools import ARCHITECTURES, missing_tools

needs_llvm = pytest.mark.skipif(bool(missing_tools()), reason=missing_tools() or "LLVM is there")
both_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
