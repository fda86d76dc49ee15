"""What a forward pass costs on this machine: measured, kept, predicted."""
