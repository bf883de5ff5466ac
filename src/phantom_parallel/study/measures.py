"""The quantities that results are about: name, label and unit of each."""

# Name of a measure in results, its label, and the unit of its values.
MEASURES: dict[str, tuple[str, str]] = {
    "loss": ("held-out loss", ""),
    "end_steps": ("steps at the end", "steps"),
    "loss_at_target": ("loss where the target was reached", ""),
    "loss_at_equal_steps": ("loss at equal steps", ""),
    "loss_at_equal_energy": ("loss at equal modelled energy", ""),
    "target": ("target loss", ""),
    "steps": ("steps", "steps"),
    "seconds": ("time", "s"),
    "step_seconds": ("step time", "s"),
    "joules": ("modelled energy", "J"),
    "measured_joules": ("measured energy", "J"),
    "joules_per_sample": ("modelled energy per sample", "J"),
    "bytes": ("bytes exchanged", "B"),
    "bytes_per_step": ("bytes exchanged per step", "B"),
    "flops": ("FLOPs", "FLOP"),
    "flops_per_step": ("FLOPs per step", "FLOP"),
    "parameters": ("parameters", ""),
    "memory_bytes": ("memory per rank", "B"),
    "blocked_share": ("share of time blocked", "%"),
    "link_rate": ("link rate", "bit/s"),
    "reached": ("reached the target", ""),
    "latency": ("inference latency", "s"),
    "inference_joules": ("inference energy per sample", "J"),
}
TO_THE_LOSS = ("steps", "seconds", "joules", "measured_joules", "flops", "bytes")


def measure_label(measure: str) -> str:
    """The label of a measure. A suffix such as that of ``latency, batch 64`` is kept."""
    name, comma, rest = measure.partition(",")
    return (MEASURES[name][0] if name in MEASURES else name.replace("_", " ")) + comma + rest


def ratio_label(measure: str) -> str:
    """The label of a ratio, which says ``to the loss`` where the measure is a total of a training."""
    label = measure_label(measure)
    return f"{label} to the loss" if measure in TO_THE_LOSS else label


def measure_unit(measure: str) -> str:
    """The unit of a measure's values."""
    name = measure.partition(",")[0]
    return MEASURES[name][1] if name in MEASURES else ""
