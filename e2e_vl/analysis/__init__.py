"""What the attention heads of a trained encoder look at: entity grounding, syntactic grounding, pictures."""
