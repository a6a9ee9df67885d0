"""What would have to change for a place that was left alone to be rewritten, by its reason code."""

from __future__ import annotations

ADVICE = {
    # kept and refused sites
    "no_rule": "write a rule whose match holds here; the module's name and the facts are what it can ask about.",
    "rule_keeps": "take implementation: keep out of the rule above, or put a rule with other settings before it.",
    "recorded": "add implementation: auto, or what is to be changed, to the rule that records.",
    "not_recorded": "let the site be rewritten: its op records by itself.",
    "unused": "let the model read its result, or leave it out of the model; nothing is lost as it is.",
    "already_satisfied": "write lowering: kernel. What the rules ask for is so already.",
    "contradiction": "let one of the two rules named match fewer sites, or give the upper one the other's setting too.",
    "unsupported_dtype": "compute this site in BF16, FP16, FP32 or FP64.",
    "probabilities_wanted": "call the model without attention weights (output_attentions=False), or write "
    "probabilities: same.",
    "no_kernel": "write implementation: auto, or run the model on a GPU, in BF16, FP16 or FP32.",
    "no_fp8": "run it on a GPU with FP8, or write on_missing_fp8: bf16; implementation: reference computes it "
    "anywhere, slowly.",
    "without_fp8": "run it on a GPU with FP8, or take matmul out of the rule: it is rewritten without.",
    "fp8_of_32_bits": "compute this site in BF16 or FP16, or add where: dtype in (bf16, fp16) to the rule.",
    "shift_too_large": "lower the limit of row_max_shift; 8 fits every dtype, 2 a P in FP8.",
    "action_refuses": "let the action compute this site, or the rule match fewer.",
    "cannot_be_placed": "compute the tensor named before the scores; and please report it, with this review.",
    # near misses of attention
    "no_query_key_product": "the scores would have to be a product of queries and keys. The softmax alone is a site.",
    "softmax_over_other_axis": "let the softmax run over the axis of the keys: look at its dim.",
    "contraction_over_other_axis": "sum over the keys in the product with V: look for a missing transpose.",
    "mixed_after_softmax": "move what stands between the softmax and V in front of the softmax, or behind the product "
    "with V. The softmax alone is a site.",
    "no_value_product": "multiply the probabilities by values. The softmax alone is a site.",
    "weighted_normaliser": "add the logarithm of the weights to the scores, and take the softmax of that.",
    "scores_used_elsewhere": "do without the scores elsewhere (logging, an auxiliary loss): the op never makes them.",
    "probabilities_used_elsewhere": "read the probabilities at one stage only: before dropout or after it.",
    "mutated_between": "use the form that makes a new tensor instead of the one that writes in place.",
    "grad_mode_changes": "move torch.no_grad() or enable_grad() around the whole attention.",
    "scores_are_broadcast": "give what is added no more dimensions than the scores, or repeat the queries.",
    "layout_not_followed": "mark the size static, or split dimensions by unflatten instead of a reshape.",
    # near misses of kinds of one's own
    "used_elsewhere": "let the site begin behind the value that is read elsewhere, or end before it.",
    "part_of_other_site": "put the recogniser that is to have the node first in sites=.",
    # near misses of norms
    "unbiased_variance": "divide the variance by n: correction=0 (unbiased=False).",
    "partial_norm": "take the statistics over the whole row.",
    "other_tensor": "take the statistics from the tensor that is normalised.",
    "eps_outside_root": "add eps to the variance, inside the root.",
    "axes_differ": "let mean and variance run over the same axes.",
    "uncentered": "take the mean away from the row before it is divided.",
    "group_norm": "nothing in the model: group norms are not rewritten in this version.",
    "l2_normalise": "divide by the root of the mean square instead of the length, if an RMS norm is meant.",
}


def advice(reason: str) -> str:
    """One sentence, "" for a reason that needs none."""
    return ADVICE.get(reason, "")
