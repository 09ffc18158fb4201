"""The judge under pytest: golden cases as test items. Every pytest of the environment loads this
package, so importing it imports nothing heavy."""
