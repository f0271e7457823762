"""Errors of actors as a user reads them."""

from ray.exceptions import ActorDiedError, RayTaskError

from megatron_grpo.errors import ConfigError, RunFailed
from megatron_grpo.ray_runtime.supervision import plain_error


def task_error(cause):
    text = f"\x1b[36mray::Worker.method()\x1b[39m (pid=1)\nTraceback (most recent call last):\n{cause!r}"
    return RayTaskError("Worker.method()", text, cause)


def test_our_own_errors_arrive_as_they_were_raised():
    cause = ConfigError("grpo.seed is missing")
    assert plain_error("collector", task_error(cause)) is cause


def test_a_failed_call_names_the_actor_and_keeps_its_traceback():
    error = plain_error("policy worker 0", task_error(ValueError("shapes differ")))
    assert isinstance(error, RunFailed)
    assert str(error).startswith("policy worker 0 failed") and "shapes differ" in str(error)


def test_a_constructor_that_raised_is_told_with_its_traceback_and_without_colours():
    error = plain_error("collector", ActorDiedError(task_error(TypeError("no such option"))))
    assert str(error).startswith("collector could not start") and "no such option" in str(error)
    assert "\x1b" not in str(error)


def test_a_death_names_the_actor():
    assert str(plain_error("reward worker 3", ActorDiedError())).startswith("reward worker 3 died: ")


def test_other_errors_are_left_alone():
    error = KeyError("x")
    assert plain_error("collector", error) is error
