from __future__ import annotations

from typing import Any

from shardtune.observe.profile_window import ProfileWindow, profile_line, summary_of, tracker_numbers


def profile(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    phases = {"data": 0.01, "forward": 0.31, "backward": 0.6, "optimizer": 0.04, "collective": 0.02}
    return {
        "step": step,
        "seconds": {"step": seconds} | {name: share * seconds for name, share in phases.items()},
        **more,
    }


def on_gpu(step: int, seconds: float) -> dict[str, Any]:
    memory = {"allocated": 1, "reserved": 2, "peak": (61 << 30) + step}
    gpu = {"power_watts": 640.0, "throttle": ["sw_power_cap"]}
    return profile(
        step, seconds, tokens={"real": 1024}, tokens_per_second=1261.4, tflops=310.2, mfu=0.3135, memory=memory, gpu=gpu
    )


def window(*profiles: dict[str, Any]) -> ProfileWindow:
    found = ProfileWindow()
    for one in profiles:
        found.add(one)
    return found


def test_the_line_fits_into_120_columns() -> None:
    line = profile_line(window(*(on_gpu(step, 0.812) for step in (122, 123))), 120)
    assert line == (
        "profile 123  812 ms/step  data 1% fwd 31% bwd 60% opt 4% comm 2%"
        "  1,261 tok/s/rank  310 TFLOP/s  MFU 31.4%  61 GiB peak"
    )
    assert len(line) <= 120


def test_eighty_columns_break_it_once_between_time_and_speed() -> None:
    first, second = profile_line(window(on_gpu(25, 1.5)), 80).splitlines()
    assert first == "profile 25  1.5 s/step  data 1% fwd 31% bwd 60% opt 4% comm 2%"
    assert second.split("  ")[1:] == ["1,261 tok/s/rank", "310 TFLOP/s", "MFU 31.4%", "61 GiB peak"]
    assert max(len(first), len(second)) <= 80


def test_a_log_file_gets_one_line_however_long() -> None:
    assert len(profile_line(window(on_gpu(25, 1.5)), None).splitlines()) == 1


def test_one_slow_step_does_not_move_the_medians() -> None:
    line = profile_line(window(profile(1, 60.0), profile(2, 0.5), profile(3, 0.5)), None)
    assert line.startswith("profile 3  500 ms/step")


def test_what_no_phase_explains_is_told_once_it_is_worth_a_word() -> None:
    slow = profile(1, 1.0)
    slow["seconds"]["forward"] = 0.1
    assert "other 23%" in profile_line(window(slow), None)
    assert "other" not in profile_line(window(profile(1, 1.0)), None)


def test_what_is_not_known_is_not_in_the_line() -> None:
    line = profile_line(window({"step": 5, "seconds": {"step": 0.02, "forward": 0.0195}}), None)
    assert line == "profile 5  20 ms/step  fwd 98%"


def test_what_a_rank_sends_is_in_the_line_and_how_much_of_it_leaves_the_node() -> None:
    one = profile(5, 1.0, collectives={"shard": 3 << 20, "replicate": 1 << 20, "other": 0})
    one["collectives_between_nodes"] = {"shard": 0, "replicate": 0, "other": 0}
    assert profile_line(window(one), None).endswith("  sent 4 MiB")
    one["collectives_between_nodes"] = {"shard": 0, "replicate": 1 << 20, "other": 0}
    assert profile_line(window(one), None).endswith("  sent 4 MiB, 1 MiB between nodes")


def test_trackers_get_every_number_and_no_word() -> None:
    numbers = tracker_numbers(window(on_gpu(1, 1.0)))
    assert numbers["profile/mfu"] == 0.3135 and numbers["profile/seconds/backward"] == 0.6
    assert numbers["profile/gpu/power_watts"] == 640
    assert "profile/step" not in numbers and not any("throttle" in name for name in numbers)


def test_a_summary_holds_the_last_profiles_and_the_highest_peak() -> None:
    found = ProfileWindow(kept=2)
    for step in (1, 2, 3):
        found.add(on_gpu(step, float(step)))
    told = summary_of(found, steps=3)
    assert told["medians"]["seconds.step"] == 2.5  # type: ignore[index]
    assert (told["steps"], told["medians_of_last"], told["gpu_memory_peak"]) == (3, 2, (61 << 30) + 3)
