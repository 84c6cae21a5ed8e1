"""How hypothesis searches: a quick fixed search by default, `--hypothesis-profile=thorough` for a long random one."""

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]  # a loaded machine is not a fault of the code

settings.register_profile(
    "quick", max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW
)
settings.register_profile("thorough", max_examples=200, database=None, deadline=None, suppress_health_check=SLOW)
settings.load_profile("quick")
