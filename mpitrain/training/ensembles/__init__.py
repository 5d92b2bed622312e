"""Several trained models as one: their answers combined, or their weights averaged."""
