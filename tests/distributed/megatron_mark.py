"""Mark of the tests that require megatron-core.

Test modules must not import megatron-core when tests are collected. The import adds classes to those that `torch.load`
accepts with weights_only, for the whole process.
"""

from importlib.util import find_spec

import pytest

MEGATRON = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install 'megaclip[megatron]'"
)
