"""The objective as a loop over tokens in float64, straight from its definition. Shares no code with the package.

A sequence is (row, list of columns); every number is a scalar, `c` a scalar tensor so that its gradient can be read.
"""

import math

import torch


def sequences_of(valid, segment_ids=None):
    """All sequences of the batch with their valid columns."""
    found = []
    for row, flags in enumerate(valid):
        ids = [0] * len(flags) if segment_ids is None else segment_ids[row]
        for segment in sorted(set(ids)):
            columns = [t for t, flag in enumerate(flags) if flag and ids[t] == segment]
            if columns:
                found.append((row, columns))
    return found


def slow_loss(config, batch, num_tokens, num_sequences):
    """(loss, actor loss, kl, gradient rows). `batch`: lists of rows under the names of the fixtures, plus `valid`."""
    c = [[torch.tensor(float(x), dtype=torch.float64, requires_grad=True) for x in row] for row in batch["curr"]]
    actor = kl_sum = entropy_sum = torch.zeros((), dtype=torch.float64)
    for row, columns in sequences_of(batch["valid"], batch.get("segment_ids")):
        weight = 1 / num_tokens if config.token_level_loss else 1 / (len(columns) * num_sequences)
        p, g, q, a = (batch[name][row] for name in ("prev", "gen", "ref", "adv"))
        mean_ratio = torch.exp(sum(c[row][t] - p[t] for t in columns) / len(columns))
        for t in columns:
            ratio = mean_ratio if config.ratio_level == "sequence" else torch.exp(c[row][t] - p[t])
            term = _policy_term(config, ratio, c[row][t], a[t])
            actor = actor + weight * _importance_weight(config, [p[s] - g[s] for s in columns], p[t] - g[t]) * term
            kl_sum = kl_sum + weight * _kl(config, q[t] - c[row][t])
            entropy_sum = entropy_sum + weight * batch["entropy"][row][t]
    loss = actor + config.reference_policy_kl_penalty * kl_sum - config.entropy_coef * entropy_sum
    if loss.requires_grad:
        loss.backward()
    gradient = [[0.0 if x.grad is None else x.grad.item() for x in row] for row in c]
    return loss.item(), actor.item(), kl_sum.item(), gradient


def _policy_term(config, ratio, c, advantage):
    clipped = torch.clamp(ratio, 1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    if config.use_cispo:
        return -advantage * clipped.detach() * c
    term = torch.maximum(-advantage * ratio, -advantage * clipped)
    if config.ratio_clip_c is not None and advantage < 0:
        term = torch.minimum(term, torch.tensor(-advantage * config.ratio_clip_c, dtype=torch.float64))
    return term


def _importance_weight(config, of_sequence, of_token):
    if not config.use_importance_sampling_correction:
        return 1.0
    weight = math.exp(sum(of_sequence) if config.is_level == "sequence" else of_token)
    kind, high = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    low = config.truncated_importance_sampling_ratio_min or 0.0
    if kind == "tis":
        return min(max(weight, low), high)
    if kind == "icepop":
        return weight if low <= weight <= high else 0.0
    if kind == "seq-mask-tis":
        return weight if low <= math.exp(sum(of_sequence) / len(of_sequence)) <= high else 0.0
    return weight


def _kl(config, d):
    if config.kl_input_clamp_value is not None:
        d = torch.clamp(d, -config.kl_input_clamp_value, config.kl_input_clamp_value)
    value = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[config.reference_policy_kl_type]
    if config.kl_output_clamp_value is not None:
        value = torch.clamp(value, -config.kl_output_clamp_value, config.kl_output_clamp_value)
    return value
