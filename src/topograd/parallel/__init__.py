"""Training over several processes and machines with torch.distributed, by the same plan and executor."""
