"""A Hugging Face Llama trained in two stages. Random weights, nothing is downloaded; needs `transformers`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import topograd as tg

TEXT = b"the hidden state goes through every layer, and every stage says what it thinks comes next. " * 8


def main(steps: int = 40) -> list[list[float]]:
    """Train on one sentence; return each step's losses, one per stage."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    stack = tg.adapt(model, layers="model.layers", norm="model.norm", head="lm_head", head_rank=4)
    tokens = torch.tensor(list(TEXT))
    stack.verify(tokens[None, :32])  # the stack gives the model's own logits, bit for bit

    topology = tg.Topology.chain(tg.Configuration.parse("2,2", heads="per-stage"))
    tg.prepare(stack, topology)  # adds a low-rank head for each stage
    optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01)
    history = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 33, (8,))
        rows = torch.stack([tokens[start : start + 33] for start in starts.tolist()])
        losses = tg.train_step(stack, topology, rows[:, :-1], rows[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        history.append(losses.tolist())
    return history


if __name__ == "__main__":
    for step, losses in enumerate(main()):
        if step % 5 == 0:
            print(f"step {step:3d}   losses by stage: " + "  ".join(f"{loss:.3f}" for loss in losses))
