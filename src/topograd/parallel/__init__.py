"""The same plan and the same executor over several processes and machines, with torch.distributed."""
