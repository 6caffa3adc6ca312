import pytest
from launch_cases import Stage


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)
