// Before the first paint, so a chosen theme does not flash. Storage may be forbidden; then the system decides.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("livedraft-theme"); } catch { /* private mode */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
