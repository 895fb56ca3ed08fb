// Apply the saved theme before the first paint.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  try {
    const theme = localStorage.getItem("taskqueue-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch { /* storage is forbidden: the system's theme applies */ }
})();
