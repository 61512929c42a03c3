"""The base of both front ends: units, trees and torch's objects over their memory."""
