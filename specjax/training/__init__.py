"""Training a drafter: answers of the target, packed batches, objectives and the trainer."""
