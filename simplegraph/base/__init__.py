"""What every room needs: errors, settings, reasons, and facts about tensors, operators and modes."""
