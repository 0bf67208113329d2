"""Individual accounting for training loops that are not ours: Opacus, Lightning, Hugging Face."""
