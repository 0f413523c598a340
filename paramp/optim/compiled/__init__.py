"""The optimizer step compiled by ``torch.compile``: one loop over memory."""
