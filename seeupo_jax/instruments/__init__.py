"""Instruments that measure the product; the product never imports them."""
