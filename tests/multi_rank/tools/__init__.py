"""What users watch training with, on several ranks."""
