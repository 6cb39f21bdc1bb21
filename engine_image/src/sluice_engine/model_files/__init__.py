"""What a model's files say: where they lie or come from, the shape they describe, their weights."""
