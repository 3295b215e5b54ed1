"""Measurements: each yields Records with where they come from. Nothing here prints, draws or stores."""
