"""Conversion: trained models with another attention, and for use elsewhere."""
