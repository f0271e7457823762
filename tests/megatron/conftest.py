import pytest

from tests.megatron import world


@pytest.fixture(scope="session", autouse=True)
def preloaded_megatron():
    """Import Megatron once; every rank of every test forks from here."""
    world.preload()
