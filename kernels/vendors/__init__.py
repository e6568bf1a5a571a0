"""Shared by the vendor library adapters: probing, availability, warm-up. Imports no library."""
