"""A first look at a model: what is attention, softmax or norm in it, and what the rules would do. Nothing is changed.

python examples/01_first_review.py
"""

import torch
import transformers

import precisionpass

transformers.logging.set_verbosity_error()


def make_model():
    """GPT-2 124M on the meta device: shapes and no weights, so that a model of any size fits anywhere."""
    config = transformers.GPT2Config(attn_implementation="eager", use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
        model.loss_type = "ForCausalLM"
        ids = torch.zeros(4, 512, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    model, args, kwargs = make_model()
    report = precisionpass.explain(model, args, kwargs, rules="stable-bf16")
    print(report)

    # The report is plain data too.
    first = report.sites[0]
    print(f"{first.module} ({first.kind}): {first.decision} by rule {first.rule}, at {first.source}")
    print("all facts a rule may ask about:", dict(first.facts))
